"""A request as a chat template sees it: what is never written into a prompt is left out.

Any JSON is taken. A field that is null, empty or unknown to templates makes no difference, since
clients add and drop such fields freely.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from prefillshare_prefix.causes import Layout

SYSTEM_ROLES = frozenset({"system", "developer"})


class Call(NamedTuple):
    """One tool call of an assistant message."""

    id: str
    name: str
    arguments: str
    """JSON text, byte for byte where the request had text."""


class Message(NamedTuple):
    """One message. Equal messages give equal prompt text."""

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    name: str = ""
    call_id: str = ""


class Request(NamedTuple):
    """A chat request: its tail (leading system messages, tools), and its context."""

    system: tuple[Message, ...]
    tools: tuple[str, ...]
    """Each as JSON text, keys in the order they were sent."""
    context: tuple[Message, ...]
    model: str


def read_request(body: object, layout: Layout = "model") -> Request:
    """`body` as far as it is a chat request. Never raises.

    With `context_first`, assistants have no names: that layout says who spoke behind the context.
    """
    fields: Mapping[Any, Any] = body if isinstance(body, Mapping) else {}
    messages = tuple(read_message(item) for item in _items(fields.get("messages")))
    if layout == "context_first":
        messages = tuple(m._replace(name="") if m.role == "assistant" else m for m in messages)
    head = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    tools = _items(fields.get("tools")) or _items(fields.get("functions"))
    return Request(
        system=messages[:head],
        tools=tuple(as_json(tool) for tool in tools),
        context=messages[head:],
        model=_text(fields.get("model")),
    )


def read_message(item: object) -> Message:
    """One entry of `messages`. Never raises."""
    if not isinstance(item, Mapping):
        return Message(role="", text=_text(item))
    role = _text(item.get("role"))
    calls = [_call(call) for call in _items(item.get("tool_calls"))]
    if isinstance(item.get("function_call"), Mapping):
        calls.append(_call({"function": item["function_call"]}))
    return Message(
        role="system" if role in SYSTEM_ROLES else role,
        text=_content(item.get("content")),
        reasoning=_text(item.get("reasoning")) or _text(item.get("reasoning_content")),
        calls=tuple(calls),
        name=_text(item.get("name")),
        call_id=_text(item.get("tool_call_id")),
    )


def shown(message: Message) -> str:
    """A message in one line, for people."""
    calls = [f"{call.name}({call.arguments})" for call in message.calls]
    speaker = f"{message.role or '?'} {message.name}".strip()
    return f"{speaker}: {' '.join(filter(None, [message.text, *calls]))}"


def as_json(value: object) -> str:
    """`value` as JSON text, keys as they are. What JSON cannot say is written somehow."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return f"<{type(value).__name__}>"


def _content(content: object) -> str:
    if not _is_list(content):
        return _text(content)
    # A list of text parts is one text, and rendered as such.
    return "\n".join(_part(part) for part in _items(content))


def _part(part: object) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    return _text(part)


def _call(call: object) -> Call:
    fields: Mapping[Any, Any] = call if isinstance(call, Mapping) else {}
    function = fields.get("function")
    if not isinstance(function, Mapping):
        return Call(_text(fields.get("id")), "", _text(function or call))
    return Call(
        _text(fields.get("id")), _text(function.get("name")), _text(function.get("arguments"))
    )


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else as_json(value)


def _items(value: object) -> Sequence[Any]:
    return value if isinstance(value, Sequence) and _is_list(value) else ()


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
