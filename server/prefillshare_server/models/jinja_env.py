"""The Jinja environment of chat templates, without transformers.

Same options, filters, globals and tags as transformers' ``apply_chat_template``
(transformers/utils/chat_template_utils.py), so a template renders alike in both; a test
holds the two together. Importing transformers for this would cost a router seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefusal(jinja2.TemplateError):
    """The template itself refused the conversation, by ``raise_exception``."""


class _Generation(Extension):
    """``{% generation %}`` marks what an assistant said; here its body is only rendered."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template in the sandbox. Raises jinja2.TemplateSyntaxError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Render chat template `source`. Raises ValueError with the template's own reason."""
    try:
        return compile_template(source).render(**variables)
    except TemplateRefusal as refusal:
        raise ValueError(
            f"the chat template refuses this conversation: {refusal.message}"
        ) from None
    except (jinja2.TemplateError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(f"the chat template cannot render this conversation: {error}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML, which would end up in the prompt.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
