"""How the fake server renders a conversation, and what it counts as a token."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from prefillshare_prefix import Layout
from prefillshare_prefix.speakers import legend

SYSTEM_ROLES = ("system", "developer")
_OPENER = "<|im_start|>assistant\n"
# Every character belongs to exactly one piece, so the pieces of a text spell it out.
_PIECE = re.compile(r"<\|\w+\|>| ?\w{1,10}|\s|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One rendered request.

    The context is the messages without the leading system message; what stands around it belongs
    to the role of this call alone.
    """

    before: str
    """With layout "model": the leading system message and the tools."""
    context: tuple[str, ...]
    """One block of text for each message of the context."""
    after: str
    """The opening of the answer; with layout "context_first" the tail before it."""

    @property
    def text(self) -> str:
        return self.before + "".join(self.context) + self.after

    def counted(self) -> Counted:
        """The same in tokens. Each part is cut by itself, so none can move another's tokens."""
        return Counted(
            tokens(self.before), [tokens(block) for block in self.context], tokens(self.after)
        )


class Counted(NamedTuple):
    """A prompt in tokens."""

    before: list[str]
    blocks: list[list[str]]
    after: list[str]

    @property
    def context(self) -> list[str]:
        return [token for block in self.blocks for token in block]

    @property
    def whole(self) -> list[str]:
        return [*self.before, *self.context, *self.after]

    def ends_of_messages(self) -> list[int]:
        """Context tokens up to the end of each message."""
        return list(accumulate(map(len, self.blocks)))


def tokens(text: str) -> list[str]:
    """Cut a text into short words with the blank before them, punctuation marks and ChatML tags."""
    return _PIECE.findall(text)


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    layout: Layout = "context_first",
) -> Prompt:
    """Write a conversation as ChatML. The same input gives the same text, always."""
    start = next(
        (i for i, item in enumerate(messages) if item["role"] not in SYSTEM_ROLES), len(messages)
    )
    parts = [text for item in messages[:start] if (text := content_text(item).strip())]
    # With layout "model" the server leaves names to the base's own template, which may drop them.
    if layout == "context_first" and (speakers := legend(messages)):
        parts.append(speakers)
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        parts.append(f"# Tools\n\n<tools>\n{listed}\n</tools>")
    own = _block("system", "\n\n".join(parts)) if parts else ""
    context = tuple(_message(item) for item in messages[start:])
    if layout == "model":
        return Prompt(own, context, _OPENER)
    return Prompt("", context, own + _OPENER)


def content_text(message: Mapping[str, Any]) -> str:
    """A message's text; parts are joined by line breaks, as the real server does."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content)
    return content or ""


def answer_text(message: Mapping[str, Any]) -> str:
    """What a model would have written to give this assistant message."""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    text = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    text += content_text(message)
    for call in message.get("tool_calls") or ():
        function = call["function"]
        name, arguments = json.dumps(function["name"]), function.get("arguments") or "{}"
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        text += f'\n<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
    return text.removeprefix("\n")


def _message(message: Mapping[str, Any]) -> str:
    role = "system" if message["role"] == "developer" else message["role"]
    return _block(role, answer_text(message))


def _block(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"
