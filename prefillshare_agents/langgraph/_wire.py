"""Keeping an answer's bytes on their way through LangChain's messages and back.

LangChain parses the argument strings of tool calls and dumps them anew when the message is sent
back. Other blanks or escapes are other tokens: everything from there on would be prefilled again.
So the generated string travels along in the message and is what goes out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage

ARGUMENTS = "prefillshare_tool_arguments"
"""Key in `additional_kwargs`: tool call index → {"id", "arguments" as generated}."""


def generated_arguments(tool_calls: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the record of some tool calls, or of pieces of them in a stream.

    Keyed by index and with string values only, so that LangChain's merging of chunks joins the
    pieces of each argument string.
    """
    return {
        str(call.get("index", position)): {
            "id": call.get("id"),
            "arguments": call["function"].get("arguments") or "",
        }
        for position, call in enumerate(tool_calls)
        if call.get("function")
    }


def restore(wire: dict[str, Any], message: BaseMessage) -> None:
    """Make `wire`, the OpenAI form of `message`, say exactly what the model generated.

    Changes `wire` in place. Arguments that were edited since (they parse to something else) are
    sent as edited. An assistant's `name` is dropped: templates that print it would put text into
    the context that was not there when the answer was generated.
    """
    if not isinstance(message, AIMessage):
        return
    wire.pop("name", None)
    recorded: Mapping[str, Mapping[str, Any]] = message.additional_kwargs.get(ARGUMENTS) or {}
    generated = {item["id"]: item["arguments"] for item in recorded.values()}
    for call in wire.get("tool_calls") or ():
        arguments = generated.get(call["id"])
        if arguments is not None and _same_value(arguments, call["function"]["arguments"]):
            call["function"]["arguments"] = arguments


def _same_value(left: str, right: str) -> bool:
    try:
        return bool(json.loads(left) == json.loads(right))
    except ValueError:
        return left == right
