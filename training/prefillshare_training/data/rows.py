"""What a row of training data may look like, and what is wrong with one that does not.

    {"messages": [...], "tools": [...]}            every answer of the assistant is learned
    {"prompt": [...], "completion": [...]}         messages; only answers in the completion are
    {"prompt": "text", "completion": "text"}       raw text, no chat template

`tools` is optional, and other keys are ignored. In the second form either side may be a text: a
user's message, or the assistant's answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefillshare_server.models import messages as chat

if TYPE_CHECKING:
    from prefillshare_training.data.rendering import Renderer
    from prefillshare_training.samples import Sample

KEYS = frozenset({"messages", "tools", "prompt", "completion"})
ROLES = ("system", "developer", "user", "assistant", "tool")
_NUMBERED = re.compile(r"^messages\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation in OpenAI's format."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    prompt_messages: int | None = None
    """How many of the messages are the row's prompt; None where the row does not tell apart."""

    def render(self, renderer: Renderer) -> Sample:
        """Its answers. Raises ValueError, naming the row's field."""
        given = self.prompt_messages
        try:
            return renderer.conversation(self.messages, self.tools, given=given or 0)
        except ValueError as error:
            if given is None or not (match := _NUMBERED.match(str(error))):
                raise
            index = int(match[1])
            field = f"prompt[{index}]" if index < given else f"completion[{index - given}]"
            raise ValueError(field + str(error)[match.end() :]) from None


@dataclass(frozen=True, slots=True)
class Raw:
    """Raw text and how it goes on."""

    prompt: str
    completion: str

    def render(self, renderer: Renderer) -> Sample:
        """Its one turn. Raises ValueError, naming the row's field."""
        return renderer.text(self.prompt, self.completion)


Row = Chat | Raw


def parse(value: object) -> Row:
    """Read a row. Raises ValueError, naming the field, for what cannot be trained on."""
    if not isinstance(value, Mapping):
        raise ValueError(f"a row must be an object, not {_short(value)}")
    # Tables have a column for every key of any row.
    row = {key: content for key, content in value.items() if content is not None}
    for key in KEYS & row.keys():
        _require_unicode(row[key], key)
    tools = _tools(row.get("tools"))
    if "messages" in row:
        if "prompt" in row or "completion" in row:
            raise ValueError("has both messages and prompt or completion; write one of the two")
        messages = _messages(row["messages"], "messages")
        _require_answer(messages, "messages")
        return Chat(messages, tools)
    if missing := [key for key in ("prompt", "completion") if key not in row]:
        if len(missing) == 1:
            raise ValueError(f"{missing[0]}: is missing")
        keys = ", ".join(map(str, row)) or "none"
        raise ValueError(f"has neither messages nor prompt and completion (its keys: {keys})")
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str) and tools is None:
        if not completion:
            raise ValueError("completion: is empty; there is nothing to learn")
        return Raw(prompt, completion)
    asked = _messages(_as_messages(prompt, "user"), "prompt")
    answers = _messages(_as_messages(completion, "assistant"), "completion")
    _require_answer(answers, "completion")
    return Chat((*asked, *answers), tools, prompt_messages=len(asked))


def _as_messages(value: object, role: str) -> object:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _messages(value: object, where: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: must be a list of messages, not {_short(value)}")
    try:
        chat.require_text(value)
    except ValueError as error:
        raise ValueError(where + str(error).removeprefix("messages")) from None
    for index, message in enumerate(value):
        if message["role"] not in ROLES:
            raise ValueError(
                f"{where}[{index}].role: {message['role']!r} is unknown; use one of "
                + ", ".join(ROLES)
            )
        if message["role"] == "assistant" and not _says_something(message):
            raise ValueError(f"{where}[{index}].content: is empty; there is nothing to learn")
    return tuple(value)


def _says_something(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    return bool(message.get("tool_calls") or (content or "").strip())


def _require_answer(messages: tuple[Mapping[str, Any], ...], where: str) -> None:
    last = messages[-1]["role"]
    if last != "assistant":
        raise ValueError(
            f"{where}[{len(messages) - 1}].role: the last message is by {last!r}; it must be the "
            "assistant's answer"
        )


def _tools(value: object) -> tuple[Mapping[str, Any], ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        # Tables cannot hold schemas that differ from row to row, so they have them as text.
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"tools: {_short(value)} is no JSON") from None
    if not isinstance(value, list | tuple):
        raise ValueError(f"tools: must be a list of tools, not {_short(value)}")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"tools[{index}]: {_short(tool)} is no tool; write "
                '{"type": "function", "function": {"name": …, "parameters": …}}'
            )
    return tuple(value) or None


def _require_unicode(value: object, where: str) -> None:
    """JSON may spell out half of a character, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(f"{where}: {half} is half of a character; write all of it") from None
    except TypeError as error:
        raise ValueError(f"{where}: holds what is no JSON ({error})") from None


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:59] + "…"
