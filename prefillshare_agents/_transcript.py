"""The append-only list of chat messages that a session's roles share."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import openai

Message: TypeAlias = Mapping[str, Any] | openai.BaseModel
"""A chat message as the OpenAI API has it: a dictionary, or a message object of a response."""

_ROLES = ("system", "developer", "user", "assistant", "tool")


class Transcript:
    """Chat messages that can be added to but never changed. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: list[dict[str, Any]] = []
        self._unanswered: set[str] = set()  # ids of tool calls without a result yet

    def append(self, messages: Iterable[Message]) -> None:
        """Add all `messages` or, if one is refused with ValueError or TypeError, none."""
        new = [_as_dict(message) for message in messages]
        with self._lock:
            position = len(self._messages)
            unanswered = set(self._unanswered)
            for offset, message in enumerate(new):
                _check(message, position + offset, unanswered)
            self._messages += new
            self._unanswered = unanswered

    def snapshot(self) -> list[dict[str, Any]]:
        """Return a deep copy: editing it cannot change what the server has already prefilled."""
        with self._lock:
            return copy.deepcopy(self._messages)

    def to_answer(self) -> list[dict[str, Any]]:
        """Return a deep copy for a model to answer. Raises ValueError if there is no turn for it:
        the context is empty, or tool calls are without results."""
        with self._lock:
            if not self._messages:
                raise ValueError("the context is empty; append(...) a user message first")
            if self._unanswered:
                raise ValueError(
                    f"tool calls without a result: {', '.join(sorted(self._unanswered))}; "
                    "append(...) the tool results first"
                )
            return copy.deepcopy(self._messages)


def _as_dict(message: Message) -> dict[str, Any]:
    if isinstance(message, openai.BaseModel):
        # Without warnings: pydantic does not expect the parsed object of a `.parse()` result.
        return answer_of(message.to_dict(warnings=False))
    if isinstance(message, Mapping):
        return _without_parsed(copy.deepcopy(dict(message)))
    raise TypeError(
        f"a message is a dictionary such as {{'role': 'user', 'content': '…'}}, not {message!r}"
    )


def answer_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's answer as it goes into the context: its empty fields left out.

    Nothing is parsed or written anew. In particular the argument strings of tool calls stay byte
    for byte as generated: parsed and dumped again they would be other tokens than those cached.
    """
    kept = {
        name: value
        for name, value in _without_parsed(message).items()
        if not (value is None or value == [])
    }
    # No text at all is null beside tool calls and "" without them, streamed or not.
    content = message.get("content") or (None if "tool_calls" in kept else "")
    return {**kept, "role": "assistant", "content": content}


def _without_parsed(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return `message` without what openai's `.parse()` adds; no server takes that back."""
    kept = {name: value for name, value in message.items() if name != "parsed"}
    calls = kept.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            call["function"].pop("parsed_arguments", None)
    return kept


def _check(message: Mapping[str, Any], position: int, unanswered: set[str]) -> None:
    """Raise ValueError if `message` cannot stand at `position`; update `unanswered` if it can."""
    where = f"messages[{position}]"
    role = message.get("role")
    if role not in _ROLES:
        raise ValueError(f"{where}: role is {role!r}; give one of {', '.join(_ROLES)}")
    if role in ("system", "developer") and position == 0:
        raise ValueError(
            f"{where}: a context cannot start with a {role} message, every role would get it as "
            "its own; give each call its instructions= (they go to the end of the prompt)"
        )
    calls = message.get("tool_calls") or []
    if calls and role != "assistant":
        raise ValueError(f"{where}: only an assistant message has tool_calls, not {role!r}")
    content = message.get("content")
    if not isinstance(content, str | list) and not (content is None and role == "assistant"):
        raise ValueError(f"{where}: content is {content!r}; give a string or a list of parts")
    if role == "tool":
        answers = message.get("tool_call_id")
        if not isinstance(answers, str) or answers not in unanswered:
            open_ids = ", ".join(sorted(unanswered)) or "none"
            raise ValueError(
                f"{where}: tool_call_id {answers!r} answers no open tool call (open: {open_ids})"
            )
        unanswered.discard(answers)
    unanswered |= _call_ids(calls, where)


def _call_ids(calls: Any, where: str) -> set[str]:
    """Return the ids of a message's tool calls. Raises ValueError if one is malformed."""
    if not isinstance(calls, list):
        raise ValueError(f"{where}: tool_calls is {calls!r}; give a list of dictionaries")
    ids: set[str] = set()
    for call in calls:
        if not isinstance(call, Mapping):
            raise ValueError(f"{where}: the tool call {call!r} is not a dictionary")
        if not isinstance(call.get("id"), str):
            raise ValueError(f"{where}: the tool call {call!r} has no id to answer")
        if call.get("type", "function") == "function":
            function = call.get("function")
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise ValueError(f"{where}: the tool call {call!r} names no function")
        if call["id"] in ids:
            raise ValueError(f"{where}: two tool calls have the id {call['id']!r}; make it unique")
        ids.add(call["id"])
    return ids
