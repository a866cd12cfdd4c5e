"""An extension of griffe: the examples in docstrings are code, not quotations in quotations."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?:(?:>>>|\.\.\.)(?: .*)?\n?)+", re.MULTILINE)


def fenced(docstring: str) -> str:
    """`docstring` with each run of `>>>` lines as a block of Python."""

    def block(found: re.Match[str]) -> str:
        lines = [line[4:] for line in found[0].splitlines()]
        return "```python\n" + "\n".join(lines) + "\n```\n"

    return _EXAMPLE.sub(block, docstring)


class Doctests(griffe.Extension):
    """Found by mkdocstrings through mkdocs.yml."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite a docstring when its object was read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
