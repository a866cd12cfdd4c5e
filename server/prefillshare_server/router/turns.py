"""Assistant turns with tool calls, as the decoder wrote them.

A tool parser turns generated text into JSON fields. Rendering these again gives the same meaning in
other bytes (blanks, escapes, key order), and the shared prefix would end there. So the text itself
is kept, and takes the fields' place when the client sends the turn back.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic_core import from_json

KEPT_TURNS = 64


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an answer; `arguments` is the JSON string the client got."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class _Turn:
    text: str
    content: str
    calls: tuple[ToolCall, ...]


class Turns:
    """Generated text of recent tool-call turns of one session, found by tool-call id."""

    def __init__(self) -> None:
        self._by_call: OrderedDict[str, _Turn] = OrderedDict()

    def fork(self) -> Self:
        """Turns that know the same ones and go their own way."""
        copy = type(self)()
        copy._by_call = self._by_call.copy()
        return copy

    def keep(self, text: str, content: str, calls: Sequence[ToolCall]) -> None:
        """Remember that `text` was parsed into `content` and `calls`.

        Only if the text says everything the calls say: where a grammar left the tool's name to the
        request, the arguments alone would tell a later reader nothing.
        """
        if not all(call.id and call.name in text for call in calls):
            return
        turn = _Turn(text, content, tuple(calls))
        for call in calls:
            self._by_call[call.id] = turn
        while len(self._by_call) > KEPT_TURNS:
            self._by_call.popitem(last=False)

    def restored(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """`message` with its tool calls as they were generated; unchanged if the client edited it.

        Any other message is returned unchanged too.
        """
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls or not isinstance(calls[0], Mapping):
            return message
        turn = self._by_call.get(str(calls[0].get("id")))
        if turn is None or not _says_the_same(turn, message, calls):
            return message
        return {
            key: value for key, value in message.items() if key not in ("tool_calls", "content")
        } | {"content": turn.text}


def _says_the_same(turn: _Turn, message: Mapping[str, Any], calls: Sequence[Any]) -> bool:
    content = message.get("content") or ""
    if not isinstance(content, str) or content.strip() != turn.content.strip():
        return False
    if len(calls) != len(turn.calls):
        return False
    for sent, kept in zip(calls, turn.calls, strict=True):
        function = sent.get("function") if isinstance(sent, Mapping) else None
        if not isinstance(function, Mapping):
            return False
        if (sent.get("id"), function.get("name")) != (kept.id, kept.name):
            return False
        if not _same_json(function.get("arguments"), kept.arguments):
            return False
    return True


def _same_json(sent: object, kept: str) -> bool:
    if sent == kept:
        return True
    try:
        value = from_json(sent) if isinstance(sent, str) else sent
        return bool(value == from_json(kept))
    except ValueError:
        return False
