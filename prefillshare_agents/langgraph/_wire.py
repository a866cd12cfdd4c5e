"""Keeping an answer's bytes on their way through LangChain's messages and back.

LangChain parses the argument strings of tool calls and dumps them anew when the message is sent
back. Other blanks or escapes are other tokens: everything from there on would be prefilled again.
So the generated string travels along in the message and is what goes out. Reasoning, which
LangChain drops, travels the same way.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage

ARGUMENTS = "prefillshare_tool_arguments"
"""Key in `additional_kwargs`: tool call index → {"id", "arguments" as generated}."""
REASONING = "reasoning_content"
"""Key in `additional_kwargs` under which LangChain's own tools look for reasoning."""


def annotate(message: BaseMessage, body: Mapping[str, Any], wire: Mapping[str, Any]) -> None:
    """Keep in `message` what LangChain drops of an answer `wire`, or a piece of it, in `body`."""
    if body.get("prefillshare"):
        message.response_metadata["prefillshare"] = body["prefillshare"]
    if reasoning := wire.get("reasoning") or wire.get("reasoning_content"):
        message.additional_kwargs[REASONING] = reasoning
    if wire.get("tool_calls"):
        message.additional_kwargs[ARGUMENTS] = _generated_arguments(wire["tool_calls"])


def _generated_arguments(tool_calls: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
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


def restore(
    wires: Sequence[dict[str, Any]],
    messages: Sequence[BaseMessage],
    own_names: Collection[str | None],
) -> None:
    """Make `wires`, the OpenAI form of `messages`, say exactly what the models generated.

    Changes `wires` in place. Arguments that were edited since (they parse to something else) are
    sent as edited. The assistants' names are kept where not all of them are in `own_names`: the
    server tells the role behind the conversation who wrote what.
    """
    speakers = {message.name for message in messages if isinstance(message, AIMessage)}
    told = bool(speakers - {None, *own_names})
    for wire, message in zip(wires, messages, strict=True):
        if isinstance(message, AIMessage):
            if not told:
                wire.pop("name", None)
            _restore(wire, message)


def _restore(wire: dict[str, Any], message: AIMessage) -> None:
    if reasoning := message.additional_kwargs.get(REASONING):
        wire["reasoning"] = reasoning
    match wire.get("content"):
        case [{"type": "text", "text": str(text)}]:  # in LangChain's content blocks
            wire["content"] = text
    generated = {item["id"]: item["arguments"] for item in recorded_calls(message)}
    calls = wire.get("tool_calls") or ()
    for call in calls:
        arguments = generated.get(call["id"])
        if arguments is not None and _same_value(arguments, call["function"]["arguments"]):
            call["function"]["arguments"] = arguments
    # LangChain sends the calls it could not parse last; the model wrote them where it did.
    order = {call_id: position for position, call_id in enumerate(generated)}
    if order and {call["id"] for call in calls} == order.keys():
        wire["tool_calls"] = sorted(calls, key=lambda call: order[call["id"]])


def recorded_calls(message: BaseMessage) -> list[Mapping[str, Any]]:
    """Return the record of the tool calls that a model of ours generated in `message`."""
    recorded: Mapping[str, Mapping[str, Any]] = message.additional_kwargs.get(ARGUMENTS) or {}
    return [recorded[index] for index in sorted(recorded, key=int)]


def _same_value(left: str, right: str) -> bool:
    try:
        return bool(json.loads(left) == json.loads(right))
    except ValueError:
        return left == right
