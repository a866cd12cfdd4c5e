"""Reading what a model wrote: numbers, normal forms, tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

_SIGN = "[-\N{MINUS SIGN}]"
_PLAIN = str.maketrans({",": None, "$": None, "\N{MINUS SIGN}": "-"})
_NUMBER = re.compile(rf"{_SIGN}?\$?(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|{_SIGN}?\.\d+")
_OPENER = re.compile(r"[{\[]")
_NEXT = re.compile(r"[\s,;]*[{\[]")
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(NamedTuple):
    """A function and its arguments."""

    name: str
    arguments: dict[str, Any]


def normalised(text: str) -> str:
    """`text` with every run of blanks as one space, and none around it."""
    return " ".join(text.split())


def number(text: str) -> Decimal | None:
    """The number that `text` is; thousands separators and a dollar sign are no part of it."""
    try:
        found = Decimal(text.translate(_PLAIN).strip().rstrip("."))
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


def last_number(text: str) -> Decimal | None:
    """The last number in `text`."""
    found = _NUMBER.findall(text)
    return number(found[-1]) if found else None


def json_value(text: str) -> Any:
    """The first JSON object or list in `text`. Raises ValueError when there is none."""
    for value in _json_values(text):
        return value
    raise ValueError("no JSON object or list")


def _json_values(text: str) -> Iterator[Any]:
    """The first JSON object or list, and those that follow it with no words between."""
    opener = _OPENER.search(text)
    while opener is not None:
        try:
            value, end = json.JSONDecoder().raw_decode(text, opener.end() - 1)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        yield value
        opener = _NEXT.match(text, end)


def tool_calls(text: str) -> list[ToolCall] | None:
    """The calls in an answer; None when it is not a well-formed call.

    Either ``<tool_call>`` blocks, as the context-first layout asks for them, or JSON objects or a
    list, possibly in a code block.
    """
    blocks = _TOOL_CALL.findall(text) or [text]
    calls: list[ToolCall] = []
    for block in blocks:
        try:
            values = list(_json_values(block))
        except ValueError:
            return None
        if not values:
            return None
        for value in values:
            for each in value if isinstance(value, list) else [value]:
                call = _call(each)
                if call is None:
                    return None
                calls.append(call)
    return calls


def _call(value: object) -> ToolCall | None:
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    # Without either it is some other object with a name.
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        # OpenAI's form has the arguments as JSON text.
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    return ToolCall(value["name"], arguments) if isinstance(arguments, dict) else None
