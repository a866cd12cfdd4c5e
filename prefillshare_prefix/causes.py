"""Why a prompt stopped sharing its beginning with the one before, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

Layout = Literal["context_first", "model"]
"""`model`: the system message and the tools stand first, as in ordinary servers."""


class Cause(StrEnum):
    """What broke a prefix. The value is a metric label; `words` and `fix` are for people."""

    ROLE_PROMPT_FIRST = "role_prompt_first"
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    TOOL_ORDER = "tool_order"
    TIMESTAMP = "timestamp"
    HISTORY_TRIMMED = "history_trimmed"
    HISTORY_SUMMARISED = "history_summarised"
    MESSAGE_EDITED = "message_edited"
    ROLE_CHANGED = "role_changed"
    MESSAGE_INSERTED = "message_inserted"
    MESSAGES_REORDERED = "messages_reordered"
    THINK_STRIPPED = "think_stripped"
    WHITESPACE = "whitespace"
    ARGUMENTS_REWRITTEN = "arguments_rewritten"
    NAME_CHANGED = "name_changed"
    RANDOM_ID = "random_id"
    TEMPLATE = "template"
    UNRELATED = "unrelated"
    UNKNOWN = "unknown"

    @property
    def words(self) -> str:
        """One sentence: what happened."""
        return _TEXTS[self][0]

    @property
    def fix(self) -> str:
        """One sentence: what to do."""
        return _TEXTS[self][1]

    @property
    def is_loss(self) -> bool:
        """Whether something prefilled is lost. False for another task of the session: that is
        reported, and neither warned of nor refused."""
        return self is not Cause.UNRELATED


_TEXTS: dict[Cause, tuple[str, str]] = {
    Cause.ROLE_PROMPT_FIRST: (
        "Each role's own instructions stand at the head of the prompt, before the conversation.",
        "Render the conversation first and the leading system message last, as PrefillShare's "
        "server does; elsewhere give all roles one system message and put what is the role's own "
        "at the end.",
    ),
    Cause.SYSTEM_CHANGED: (
        "The system message at the head of the prompt is not the one of the call before.",
        "Keep the leading system message constant and put what changes at the end of the prompt.",
    ),
    Cause.TOOLS_CHANGED: (
        "The list of tools at the head of the prompt is not the one of the call before.",
        "Send every role the same list of tools, or use a server that renders tools last.",
    ),
    Cause.TOOL_ORDER: (
        "The tools are the same, but they, or the fields of their schemas, come in another order.",
        "Sort the tools by name before every call, and do not build them from sets.",
    ),
    Cause.TIMESTAMP: (
        "A date or time in earlier text is not the one that was sent before.",
        "Take the time once when the conversation begins, or move it into the newest message.",
    ),
    Cause.HISTORY_TRIMMED: (
        "Earlier messages were dropped from the conversation.",
        "Append only while the conversation fits into the context window; when it does not, trim "
        "rarely and much instead of a little before every call.",
    ),
    Cause.HISTORY_SUMMARISED: (
        "Earlier messages were replaced by a summary.",
        "Summarise rarely, when the context window is nearly full, and append a summary instead of "
        "replacing what it covers while there is room.",
    ),
    Cause.MESSAGE_EDITED: (
        "A message that was sent before has another content now.",
        "Leave messages as they were sent and append what is new.",
    ),
    Cause.ROLE_CHANGED: (
        "The same text was sent before as another role's: one agent's answer is the user's turn "
        "for the next.",
        "Send every agent the same messages, each answer as the assistant's with its speaker's "
        "name, and say in the agent's system message which of them it wrote.",
    ),
    Cause.MESSAGE_INSERTED: (
        "A message was put in front of messages that were sent before.",
        "Append it behind them.",
    ),
    Cause.MESSAGES_REORDERED: (
        "Messages that were sent before come in another order.",
        "Keep the order in which they were sent first, and append in a fixed order where several "
        "branches meet.",
    ),
    Cause.THINK_STRIPPED: (
        "The thoughts of an earlier answer were removed, or written in another form.",
        "Send each answer back in one form from the first call on: always with its thoughts, or "
        "never.",
    ),
    Cause.WHITESPACE: (
        "A message that was sent before differs in blanks or line breaks only.",
        "Send text back byte for byte: no strip(), no new indentation.",
    ),
    Cause.ARGUMENTS_REWRITTEN: (
        "The same JSON was written in other bytes: blanks, key order or escapes.",
        "Keep the JSON text as it was received, and do not parse and dump it again.",
    ),
    Cause.NAME_CHANGED: (
        "The name on a message, or the way it is written into the text, has changed.",
        "Give a message its speaker's name once, when it is appended.",
    ),
    Cause.RANDOM_ID: (
        "A generated id in earlier text is a new one.",
        "Make an id once and keep it with its message.",
    ),
    Cause.TEMPLATE: (
        "The messages go on from the earlier ones, but the chat template writes those "
        "differently now.",
        "Use a template that writes earlier turns as it wrote them when they were new.",
    ),
    Cause.UNRELATED: (
        "The conversation has nothing in common with the earlier ones of its session: another "
        "task, and no loss.",
        "Nothing to mend, unless it is about the shared context: then begin with that.",
    ),
    Cause.UNKNOWN: (
        "The prompt does not go on from an earlier one.",
        "Compare the two requests that are named, from the given token on.",
    ),
}


@dataclass(frozen=True, slots=True)
class Break:
    """Where and why a request does not go on from an earlier one."""

    cause: Cause
    message_index: int | None
    """Into the later request's `messages` as sent; None where no message is to blame."""
    detail: str
    """The place and the change, for example "messages[2].content: '…10:41' became '…10:42'"."""
    expected: str
    """At most 80 characters of the earlier text around the first difference."""
    found: str
    """The same of the later text."""

    @property
    def words(self) -> str:
        return self.cause.words

    @property
    def fix(self) -> str:
        return self.cause.fix

    @property
    def is_loss(self) -> bool:
        return self.cause.is_loss

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Break:
        """What `to_dict` wrote, or a server of another version: what it lacks is unknown."""
        named = fields.get("cause")
        index = fields.get("message_index")
        return cls(
            cause=Cause(named) if named in list(Cause) else Cause.UNKNOWN,
            message_index=index if isinstance(index, int) else None,
            detail=str(fields.get("detail") or ""),
            expected=str(fields.get("expected") or ""),
            found=str(fields.get("found") or ""),
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON object with every field and the fix."""
        return {
            "cause": self.cause.value,
            "message_index": self.message_index,
            "detail": self.detail,
            "expected": self.expected,
            "found": self.found,
            "fix": self.fix,
        }
