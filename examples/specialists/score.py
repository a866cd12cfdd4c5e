"""Whether an answer does its role's job, as plain text: nothing guided its decoding.

An answer is judged by what the graph would do with it, not by its wording: the planner's `next`,
the tool and its arguments, the number in the solver's answer, the critic's verdict.
"""

import json
import re
from typing import Any

from examples.specialists.episodes import Message

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def correct(role: str, answer: str, expected: Message) -> bool:
    """Whether `answer` is as good as `expected`, the assistant message of the row."""
    if role == "toolcaller":
        return _only_call(answer) == _wanted_call(expected)
    wanted = json.loads(expected["content"])
    found = first_object(answer)
    match role:
        case "planner":
            return bool(found.get("next") == wanted["next"])
        case "critic":
            return bool(found.get("verdict") == wanted["verdict"])
        case "solver":
            return _NUMBER.findall(str(found.get("answer"))) == _NUMBER.findall(wanted["answer"])
    raise ValueError(f"no job is known for role {role!r}")


def text_of(message: Message) -> str:
    """An assistant message as the model writes it, tool calls included."""
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call["function"]["name"])}, '
        f'"arguments": {call["function"]["arguments"]}}}\n</tool_call>'
        for call in message.get("tool_calls") or ()
    ]
    return "\n".join([*([message["content"]] if message.get("content") else []), *calls])


def first_object(text: str) -> dict[str, Any]:
    """The first JSON object in `text`, whatever stands around it; empty when there is none."""
    decoder = json.JSONDecoder()
    for start in re.finditer(r"\{", text):
        try:
            found, _ = decoder.raw_decode(text, start.start())
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def _only_call(text: str) -> tuple[Any, Any] | None:
    """Name and arguments of the tool call in `text`, if it has exactly one."""
    calls = _CALL.findall(text)
    if len(calls) != 1:
        return None
    found = first_object(calls[0])
    return found.get("name"), found.get("arguments")


def _wanted_call(expected: Message) -> tuple[str, Any]:
    (call,) = expected["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])
