"""Short ways to write requests, for the tests of prefix breaks."""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str, **fields: Any) -> Message:
    return {"role": "user", "content": text, **fields}


def said(text: str | None, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def called(name: str, arguments: Any, call_id: str = "call-1") -> Message:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": written}
    return said(None, tool_calls=[{"id": call_id, "type": "function", "function": function}])


def result(text: str, call_id: str = "call-1") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def tool(name: str, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def request(*messages: Message, model: str = "planner", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": list(messages), **fields}
