"""The append-only list of chat messages that a session's roles share."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import openai

Message: TypeAlias = Mapping[str, Any] | openai.BaseModel
"""A chat message as the OpenAI API has it: a dictionary, or a message object of a response."""

_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A place in a session's context to come back to."""

    session_id: str
    length: int
    """Messages of the context before it."""
    digest: str
    """Of these messages: a place that was taken back is not found again by its number."""


class Place(NamedTuple):
    """Where a call began: its answer joins only while the messages it answers are there."""

    length: int
    cuts: int


class Transcript:
    """Chat messages that can be added to but never changed. Safe to use from several threads.

    An assistant message may have a `name`: the role that wrote it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._messages: list[dict[str, Any]] = []
        self._unanswered: set[str] = set()  # ids of tool calls without a result yet
        self._cuts: list[int] = []  # lengths that were gone back to

    def append(self, messages: Iterable[Message]) -> None:
        """Add all `messages` or, if one is refused with ValueError or TypeError, none.

        A tool's result goes behind its call, also where another role's answer has come between:
        nothing can be sent while a call is without its result, so what was sent stays as it was.
        """
        new = [_as_dict(message) for message in messages]
        with self._lock:
            grown = list(self._messages)
            unanswered = set(self._unanswered)
            for message in new:
                _check(message, len(grown), unanswered)
                grown.insert(_position(grown, message), message)
            self._messages, self._unanswered = grown, unanswered

    def join(self, answer: Mapping[str, Any], place: Place) -> None:
        """Add the answer of a call that began at `place`, unless that was taken back since.

        Raises ValueError like `append`.
        """
        with self._lock:
            if not any(length < place.length for length in self._cuts[place.cuts :]):
                self.append([answer])

    def snapshot(self) -> list[dict[str, Any]]:
        """Return a deep copy: editing it cannot change what the server has already prefilled."""
        with self._lock:
            return copy.deepcopy(self._messages)

    def __len__(self) -> int:
        return len(self._messages)

    def checkpoint(self, session_id: str) -> Checkpoint:
        """Return the present end of the context."""
        with self._lock:
            return Checkpoint(session_id, len(self._messages), _digest(self._messages))

    def cut(self, checkpoint: Checkpoint) -> None:
        """Take back what stands behind a place. Raises ValueError if that is gone itself."""
        with self._lock:
            kept = self._messages[: checkpoint.length]
            if len(kept) < checkpoint.length or _digest(kept) != checkpoint.digest:
                raise ValueError(
                    f"the context no longer has the {checkpoint.length} messages of the "
                    "checkpoint: they were taken back; restore an earlier one"
                )
            unanswered: set[str] = set()
            for position, message in enumerate(kept):
                _check(message, position, unanswered)
            self._messages, self._unanswered = kept, unanswered
            self._cuts.append(checkpoint.length)

    def last_answer(self) -> str | None:
        """Return the text of the last assistant message that has one."""
        with self._lock:
            texts = (m.get("content") for m in reversed(self._messages) if m["role"] == "assistant")
            return next((text for text in texts if isinstance(text, str) and text), None)

    def settled(self) -> list[dict[str, Any]]:
        """Return a deep copy of what no later message can stand before: up to an open tool call."""
        with self._lock:
            open_at = (i for i, m in enumerate(self._messages) if _calls_of(m) & self._unanswered)
            return copy.deepcopy(self._messages[: next(open_at, len(self._messages))])

    def to_answer(self) -> tuple[list[dict[str, Any]], Place]:
        """Return a deep copy for a model to answer, and its place.

        Raises ValueError if there is no turn for a model: the context is empty, or tool calls are
        without results.
        """
        with self._lock:
            if not self._messages:
                raise ValueError("the context is empty; append(...) a user message first")
            if self._unanswered:
                raise ValueError(
                    f"tool calls without a result: {', '.join(sorted(self._unanswered))}; "
                    "append(...) the tool results first"
                )
            place = Place(len(self._messages), len(self._cuts))
            return copy.deepcopy(self._messages), place


def _position(messages: list[dict[str, Any]], message: Mapping[str, Any]) -> int:
    """Where `message` goes: a tool's result behind its call and the results there, else last."""
    if message["role"] != "tool":
        return len(messages)
    answers = message["tool_call_id"]
    position = len(messages)
    while answers not in _calls_of(messages[position - 1]):
        position -= 1
    while position < len(messages) and messages[position]["role"] == "tool":
        position += 1
    return position


def _calls_of(message: Mapping[str, Any]) -> set[str]:
    return {call["id"] for call in message.get("tool_calls") or ()}


def _digest(messages: list[dict[str, Any]]) -> str:
    text = json.dumps(messages, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def speakers_shown(messages: list[dict[str, Any]], role: str) -> bool:
    """Return whether `role` needs to be told who wrote the assistant messages: not all are its."""
    return {m.get("name") for m in messages if m["role"] == "assistant"} - {role, None} != set()


def without_speakers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages`, the assistants' without their names. Mutates them."""
    for message in messages:
        if message["role"] == "assistant":
            message.pop("name", None)
    return messages


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
