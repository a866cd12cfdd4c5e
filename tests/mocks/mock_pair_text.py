"""MOCK of what vLLM's API process makes of token ids: text, and fields that parsers find in it."""

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.mocks.mock_pair_language import Vocabulary

_CALL = re.compile(r'\s*{"name": "([^"]*)", "arguments": (.*)', re.DOTALL)
_TOOL, _THINK, _THOUGHT = "<tool_call>", "<think>", "</think>"


@dataclass
class Fields:
    """An answer as a client sees it."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and arguments of each tool call."""


def parsed(text: str, form: str) -> Fields:
    """What a parser finds in `text`, which may be the start of a longer one.

    A longer text gives longer fields with the same beginnings.
    """
    if form == "tools":
        return _tools(text)
    if form == "reason":
        return _reason(text)
    return Fields(content=text)


def text_of(words: Vocabulary, ids: Sequence[int]) -> str:
    """The text of an answer; a character that is not complete is left out, as in a stream."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    return "".join(decoder.decode(words.bytes_of(token)) for token in ids)


class Deltas:
    """Turns token ids into the deltas of a chat stream, or pieces of a completion's text.

    Ids of tool calls are random: two attempts at one answer never agree on them.
    """

    def __init__(self, words: Vocabulary, form: str, random: Random) -> None:
        self.text = ""
        self._words = words
        self._form = form
        self._random = random
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._sent = Fields()

    def piece(self, ids: Sequence[int]) -> str:
        """The text that `ids` add."""
        new = "".join(self._decoder.decode(self._words.bytes_of(token)) for token in ids)
        self.text += new
        return new

    def delta(self, ids: Sequence[int]) -> dict[str, Any]:
        """What `ids` add to the assistant's message; empty while a parser waits for more."""
        new = self.piece(ids)
        if self._form in ("text", "json"):
            return {"content": new}
        seen, sent = parsed(self.text, self._form), self._sent
        self._sent = seen
        delta: dict[str, Any] = {}
        if len(seen.content) > len(sent.content):
            delta["content"] = seen.content[len(sent.content) :]
        if len(seen.reasoning) > len(sent.reasoning):
            delta["reasoning"] = seen.reasoning[len(sent.reasoning) :]
        calls: list[dict[str, Any]] = []
        for index, (name, arguments) in enumerate(seen.calls):
            if index >= len(sent.calls):
                calls.append(self._opened(index, name))
            before = sent.calls[index][1] if index < len(sent.calls) else ""
            if len(arguments) > len(before):
                piece = {"arguments": arguments[len(before) :]}
                if calls and calls[-1]["index"] == index:
                    calls[-1]["function"] |= piece
                else:
                    calls.append({"index": index, "function": piece})
        return delta | ({"tool_calls": calls} if calls else {})

    def message(self) -> dict[str, Any]:
        """The assistant's message of a whole answer that was fed in through `piece`."""
        seen = parsed(self.text, self._form)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": seen.content or (None if seen.calls or seen.reasoning else ""),
            "reasoning": seen.reasoning or None,
        }
        if seen.calls:
            message["tool_calls"] = [
                self._opened(index, name) | {"function": {"name": name, "arguments": arguments}}
                for index, (name, arguments) in enumerate(seen.calls)
            ]
        return message

    def _opened(self, index: int, name: str) -> dict[str, Any]:
        return {
            "index": index,
            "id": f"call-{self._random.getrandbits(64):016x}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }


def _tools(text: str) -> Fields:
    if not text.startswith(_TOOL):
        return Fields(content="" if _TOOL.startswith(text) else text)
    fields = Fields()
    for segment in text.split(_TOOL)[1:]:
        match = _CALL.match(segment)
        if match is None:
            break
        arguments, closing, _ = match[2].partition("}")
        fields.calls.append((match[1], arguments + closing))
    return fields


def _reason(text: str) -> Fields:
    if not text.startswith(_THINK):
        return Fields(content="" if _THINK.startswith(text) else text)
    thought, end, content = text.removeprefix(_THINK).partition(_THOUGHT)
    if not end:
        # The end of the text may be the start of the mark.
        for length in range(len(_THOUGHT) - 1, 0, -1):
            if thought.endswith(_THOUGHT[:length]):
                thought = thought[:-length]
                break
    return Fields(content=content, reasoning=thought)
