"""The blocks of code in the documents, as their readers copy them."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Reports to other projects show those projects' code.
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(page for page in DOCS.rglob("*.md") if DOCS / "upstream" not in page.parents),
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("examples/**/README.md")),
]
"""Their Python runs; their commands, cluster files and tables are looked at."""

_BLOCK = re.compile(
    r"(?:^ *<!-- answers: (?P<answers>.+?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)[ \t]*(?P<mark>\S.*?)?[ \t]*\n"
    r"(?P<text>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
_SKIP = re.compile(r'\{skip="([^"]{10,})"\}')


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. `line` is that of its first line of code."""

    page: str
    line: int
    language: str
    text: str
    answers: dict[str, list[Any]]
    """Role → what the server answers it with, from a comment above the fence."""
    skip: str | None
    """Why it is not checked, from `{skip="…"}` behind the language."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All of a page, in order. Raises ValueError for a mark that is no `{skip="a reason"}`."""
    text = page.read_text(encoding="utf-8")
    return [_block(page, text, found) for found in _BLOCK.finditer(text)]


def blocks_of(*languages: str) -> list[Block]:
    """All blocks of these languages that are to be checked."""
    found = [block for page in DOCUMENTS for block in blocks(page)]
    return [block for block in found if block.language in languages and block.skip is None]


def _block(page: Path, text: str, found: re.Match[str]) -> Block:
    line = text.count("\n", 0, found.start("text")) + 1
    name = str(page.relative_to(ROOT))
    mark = found["mark"]
    skip = _SKIP.fullmatch(mark) if mark else None
    if mark and skip is None:
        raise ValueError(f'{name}:{line - 1}: {mark} is not {{skip="a reason, in a few words"}}')
    return Block(
        page=name,
        line=line,
        language=found["language"],
        text=textwrap.dedent(found["text"]),
        answers=json.loads(found["answers"]) if found["answers"] else {},
        skip=skip[1] if skip else None,
    )
