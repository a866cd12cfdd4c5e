"""Any JSONL file with prompts and the answers they should get."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_training.data import rows, sources
from prefillshare_training.evaluate.tasks import text
from prefillshare_training.evaluate.tasks.task import Item

if TYPE_CHECKING:
    from prefillshare_training.data.rendering import Renderer

Match = Literal["exact", "contains", "number", "json"]

_ROLES_OF_ANSWERS = ("assistant",)


@dataclass(frozen=True)
class Exact:
    """Rows as in training; ``answer`` may stand for ``completion``, or for the last message.

    Prompts have the ids they have in training. Of a conversation the last answer is asked for; the
    earlier ones are given.
    """

    source: str
    match: Match = "exact"
    """``exact``: the same but for blanks; ``contains``: the answer is part of the text;
    ``number``: the last number is equal; ``json``: the JSON in it, or the tool calls, are equal."""
    name: str = "exact"
    max_tokens: int = 256

    def items(self, renderer: Renderer) -> list[Item]:
        """Every row of the file. Raises ConfigError for the first bad ones."""
        found: list[Item] = []
        problems: list[Problem] = []
        for place, value, problem in sources.find(self.source, None).records():
            try:
                if problem is not None:
                    raise ValueError(problem)
                found.append(self._item(renderer, value, len(found)))
            except ValueError as error:
                problems.append(Problem(place, str(error), "correct the row"))
        if problems:
            raise ConfigError(*problems[:5])
        return found

    def _item(self, renderer: Renderer, value: object, index: int) -> Item:
        row = rows.parse(_with_completion(value))
        given = value.get("answer") if isinstance(value, Mapping) else None
        [*_, turn] = row.render(renderer).turns
        expected = given if given is not None else _expected(row)
        self._require_comparable(expected)
        key = value.get("id", index) if isinstance(value, Mapping) else index
        return Item(str(key), turn.prompt_ids, expected)

    def _require_comparable(self, expected: Any) -> None:
        if self.match == "number" and _number(expected) is None:
            raise ValueError(f"answer: {expected!r} has no number to compare")
        if self.match == "json":
            _json(_said(expected))
        if not _said(expected).strip():
            raise ValueError("answer: is blank; there is nothing to compare")

    def score(self, item: Item, text_: str) -> Mapping[str, float]:
        """One metric, named after the match."""
        return {self.match: float(self._matches(item.expected, text_))}

    def _matches(self, expected: Any, said: str) -> bool:
        if self.match == "number":
            return text.last_number(said) == _number(expected)
        if self.match == "json":
            # Both are read the same way, so that an object of either form is a call, or neither.
            wanted = _canonical(_json(_said(expected)))
            try:
                return _canonical(_json(said)) == wanted
            except ValueError:
                return False
        wanted = text.normalised(_said(expected))
        spoken = text.normalised(said)
        return wanted in spoken if self.match == "contains" else wanted == spoken


def _with_completion(value: object) -> object:
    """The row in a form of training, whose completion says what is expected."""
    # Tables have every column in every row, null where it does not apply.
    if not isinstance(value, Mapping) or value.get("answer") is None:
        return value
    spoken = _said(value["answer"])
    row = {key: each for key, each in value.items() if key != "answer"}
    if "messages" in row:
        messages = row["messages"]
        if isinstance(messages, list) and messages and _role(messages[-1]) not in _ROLES_OF_ANSWERS:
            row["messages"] = [*messages, {"role": "assistant", "content": spoken}]
        return row
    return {**row, "completion": spoken}


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, Mapping) else None


def _expected(row: rows.Row) -> Any:
    """What the row's own last answer says: its text, or its tool calls as JSON."""
    if isinstance(row, rows.Raw):
        return row.completion
    last = row.messages[-1]
    if calls := last.get("tool_calls"):
        found = text.tool_calls(json.dumps(list(calls)))
        if found is None:
            raise ValueError("tool_calls: are not well-formed")
        return [call._asdict() for call in found]
    content = last.get("content")
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def _number(expected: Any) -> Any:
    return text.last_number(str(expected))


def _json(said: str) -> Any:
    """Tool calls as a list of name and arguments, else the first JSON value."""
    calls = text.tool_calls(said)
    if calls is not None:
        return [call._asdict() for call in calls]
    try:
        return text.json_value(said)
    except ValueError as error:
        raise ValueError(f"answer: {error}") from None


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _said(expected: Any) -> str:
    """What is expected, as a model would write it."""
    return expected if isinstance(expected, str) else json.dumps(expected, ensure_ascii=False)
