"""What one sequence generated: its ids, its text, its tool calls."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from prefillshare_server.router.tokens import Tokens
from prefillshare_server.router.turns import ToolCall


class Written(NamedTuple):
    """Generated text as the next context repeats it, with exactly its ids."""

    text: str
    ids: Sequence[int]


class Tally:
    """Adds up the answers of one decode call: chunks, or one whole answer."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.usage: Mapping[str, Any] = {}
        """The decode worker's own, complete with the last answer."""
        self._texts: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}

    @property
    def content(self) -> str:
        """Content of the assistant's message, or text of the completion."""
        return "".join(self._texts)

    @property
    def generated_tokens(self) -> int:
        """Tokens generated, end-of-turn token included."""
        return int(self.usage.get("completion_tokens") or len(self.ids))

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Tool calls as the client saw them."""
        return [ToolCall(**self._calls[i]) for i in sorted(self._calls)]

    def add(self, answer: Mapping[str, Any]) -> None:
        """Count one answer in. Does not change it."""
        self.usage = answer.get("usage") or self.usage
        for choice in answer.get("choices") or ():
            self.ids.extend(choice.get("token_ids") or ())
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            said = choice.get("message") or choice.get("delta") or {}
            self._texts.append(said.get("content") or choice.get("text") or "")
            for position, call in enumerate(said.get("tool_calls") or ()):
                kept = self._calls.setdefault(
                    call.get("index", position), {"id": "", "name": "", "arguments": ""}
                )
                function = call.get("function") or {}
                kept["id"] = call.get("id") or kept["id"]
                kept["name"] = function.get("name") or kept["name"]
                kept["arguments"] += function.get("arguments") or ""

    def written(self, tokens: Tokens) -> Written | None:
        """The text and ids by which a later context repeats this answer.

        None unless the ids spell the text out exactly: a stop string, hidden reasoning or special
        tokens in the middle make them differ.
        """
        ids = self.ids
        if self.finish_reason != "length" and ids and ids[-1] in tokens.special_ids:
            ids = ids[:-1]
        if not ids:
            return None
        text = tokens.decode(ids)
        if self._calls or text == self.content:
            return Written(text, ids)
        return None
