"""Two forms of one message: what was done to it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from prefillshare_prefix.causes import Break, Cause
from prefillshare_prefix.messages import Call, Message
from prefillshare_prefix.texts import same_but_for, same_json

_INLINE_NAME = re.compile(r"<name>(.*?)</name>\s*<content>(.*)</content>", re.DOTALL)
# When several things happened to one message, the one to look at first.
_ORDER = (
    Cause.TIMESTAMP,
    Cause.THINK_STRIPPED,
    Cause.ARGUMENTS_REWRITTEN,
    Cause.NAME_CHANGED,
    Cause.RANDOM_ID,
    Cause.WHITESPACE,
    Cause.UNKNOWN,
)


class Field(NamedTuple):
    """A field of a message in two forms."""

    name: str
    before: str
    after: str


def rewriting(before: Message, after: Message) -> Cause | None:
    """What made `after` of `before`; None unless it is certain that both are one message."""
    if before.role != after.role or before == after:
        return None
    causes: set[Cause] = set()
    if before.text != after.text:
        named = _name_written_into(before, after)
        same = Cause.NAME_CHANGED if named else same_but_for(before.text, after.text)
        if same is None:
            return None
        causes.add(same)
    if before.reasoning != after.reasoning:
        if before.reasoning and after.reasoning:
            return None
        causes.add(Cause.THINK_STRIPPED)
    if before.calls != after.calls:
        found = _calls(before.calls, after.calls)
        if found is None:
            return None
        causes |= found
    if before.call_id != after.call_id:
        causes.add(Cause.RANDOM_ID)
    if before.name != after.name:
        causes.add(Cause.NAME_CHANGED)
    if not (before.text or before.calls) and not (after.text or after.calls):
        return None  # nothing that could show they are one message
    return next(cause for cause in _ORDER if cause in causes)


def changed_field(before: Message, after: Message) -> Field:
    """The first field in which two messages differ."""
    if before.role != after.role:
        return Field("role", before.role, after.role)
    for name, one, other in (
        ("reasoning", before.reasoning, after.reasoning),
        ("content", before.text, after.text),
    ):
        if one != other:
            return Field(name, one, other)
    for position, (call, later) in enumerate(zip(before.calls, after.calls, strict=False)):
        where = f"tool_calls[{position}]"
        if call.name != later.name:
            return Field(f"{where}.function.name", call.name, later.name)
        if call.arguments != later.arguments:
            return Field(f"{where}.function.arguments", call.arguments, later.arguments)
        if call.id != later.id:
            return Field(f"{where}.id", call.id, later.id)
    if before.calls != after.calls:
        return Field("tool_calls", f"{len(before.calls)} calls", f"{len(after.calls)} calls")
    if before.name != after.name:
        return Field("name", before.name, after.name)
    return Field("tool_call_id", before.call_id, after.call_id)


def is_unwritten(
    found: Break, head: int, text: str, kept: Iterable[tuple[int, str | None]]
) -> bool:
    """Whether the template leaves out what has changed: then nothing is lost.

    `text` is the rendered context of the request, `head` the number of its leading system
    messages, and `kept` has the number of messages and the text of each earlier context.
    """
    at = max((found.message_index or 0) - head, 0)
    return any(count > at and before and text.startswith(before) for count, before in kept)


def _calls(before: tuple[Call, ...], after: tuple[Call, ...]) -> set[Cause] | None:
    if [call.name for call in before] != [call.name for call in after]:
        return None
    causes: set[Cause] = set()
    for one, other in zip(before, after, strict=True):
        if one.arguments != other.arguments:
            if not same_json(one.arguments, other.arguments):
                return None
            causes.add(Cause.ARGUMENTS_REWRITTEN)
        if one.id != other.id:
            causes.add(Cause.RANDOM_ID)
    return causes


def _name_written_into(before: Message, after: Message) -> bool:
    """Whether one text is the other with the speaker's name written into it."""
    for plain, marked in ((before, after), (after, before)):
        match = _INLINE_NAME.fullmatch(marked.text.strip())
        if match and match[2].strip() == plain.text.strip():
            return True
        name = plain.name or marked.name
        if name and marked.text in (f"{name}: {plain.text}", f"[{name}] {plain.text}"):
            return True
    return False
