"""Messages in OpenAI's chat format, as a chat template needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

Message = Mapping[str, Any]

SYSTEM_ROLES = frozenset({"system", "developer"})


def require_text(messages: Sequence[Message]) -> None:
    """Raise ValueError, naming the field, unless `messages` are well formed and only text."""
    if not messages:
        raise ValueError("messages: must not be empty; send at least one message")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where}: {message!r} is no message; send an object with a role")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where}.role: {message.get('role')!r} is no role; send a string")
        _require_text_content(message.get("content"), f"{where}.content")
        _require_tool_calls(message.get("tool_calls"), f"{where}.tool_calls")


def without_head(messages: Sequence[Message]) -> list[Message]:
    """`messages` from the first one that is no system message."""
    for index, message in enumerate(messages):
        if message["role"] not in SYSTEM_ROLES:
            return list(messages[index:])
    return []


def with_parsed_arguments(message: Message) -> Message:
    """`message` with the arguments of its tool calls as objects instead of JSON text.

    What a model wrote need not be JSON; such arguments stay text.
    """
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = {**call["function"], "arguments": _parsed(call["function"].get("arguments"))}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        # Bounds the depth, which json.loads leaves to Python's stack.
        return from_json(arguments)
    except ValueError:
        return arguments


def _require_text_content(content: Any, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ValueError(f"{where}: {content!r} is no text; send a string or a list of text parts")
    for position, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise ValueError(
                f"{where}[{position}].type: {kind!r} is not supported; send only 'text' parts"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where}[{position}].text: {part.get('text')!r} is no string")


def _require_tool_calls(calls: Any, where: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise ValueError(f"{where}: {calls!r} is no list; send a list of function calls")
    for position, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{where}[{position}].function: needs a name and arguments; got {call!r}"
            )
