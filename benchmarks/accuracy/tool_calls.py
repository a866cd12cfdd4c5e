"""Training data for tool calling, from those categories of BFCL that are not the test.

``live_simple`` and ``live_multiple`` are requests of real users, each with the answers that count
as right. What is like a test item is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from prefillshare_training.evaluate.tasks import bfcl, bfcl_checker, wheels

if TYPE_CHECKING:
    from pathlib import Path

TRAINING = ("live_simple", "live_multiple")
TEST = ("simple_python", "multiple")
NEAR = 0.3
"""Questions that share more of their five-word sequences (Jaccard) count as one."""

_OPTIONAL = ""
"""Among the right values of an argument it says that the argument may be left out."""

Item = Mapping[str, Any]


class TrainingData(NamedTuple):
    """Rows for the trainer, and what was left out."""

    rows: list[dict[str, Any]]
    """``messages`` and ``tools``; the last message calls a tool."""
    overlapping: int
    """Items left out because a test item is like them."""


def training_data() -> TrainingData:
    """What can be trained on, in BFCL's order. Raises ConfigError when it is not installed."""
    test = [item for category in TEST for item in items(category)]
    items_of = {category: items(category) for category in TRAINING}
    answers = {
        answer["id"]: answer["ground_truth"]
        for category in TRAINING
        for answer in _rows(f"possible_answer/BFCL_v4_{category}.json")
    }
    kept = [item for found in items_of.values() for item in without_overlap(found, test)]
    return TrainingData(
        [row(item, answers[item["id"]]) for item in kept],
        sum(map(len, items_of.values())) - len(kept),
    )


def items(category: str) -> list[Item]:
    """The questions of a category, with their functions."""
    return list(_rows(f"BFCL_v4_{category}.json"))


def without_overlap(found: Iterable[Item], test: Iterable[Item]) -> list[Item]:
    """The items whose question and functions are not those of a test item, nor nearly so."""
    test = list(test)
    asked = [_five_words(item) for item in test]
    functions = {_described(function) for item in test for function in item["function"]}
    return [
        item
        for item in found
        if all(_likeness(_five_words(item), other) <= NEAR for other in asked)
        and functions.isdisjoint(map(_described, item["function"]))
    ]


def row(item: Item, truth: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An item and its right answer as a row of training data, in the words of the evaluation."""
    calls = [
        {
            "type": "function",
            "function": {"name": name.replace(".", "_"), "arguments": _arguments(arguments)},
        }
        for call in truth
        for name, arguments in call.items()
    ]
    [messages] = item["question"]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    tools = [bfcl.tool(function) for function in item["function"]]
    return {"messages": [*messages, answer], "tools": tools}


def _arguments(right: Mapping[str, Any]) -> dict[str, Any]:
    """The first right value of every argument, but for those that may be left out."""
    listed = {
        name: values if isinstance(values, list) else [values] for name, values in right.items()
    }
    return {
        name: _value(values[0])
        for name, values in listed.items()
        if values and _OPTIONAL not in values
    }


def _value(right: Any) -> Any:
    # In an object, each field has a list of right values again.
    if isinstance(right, Mapping):
        return _arguments(right)
    return [_value(each) for each in right] if isinstance(right, list) else right


def _five_words(item: Item) -> frozenset[tuple[str, ...]]:
    asked = [m["content"] for turn in item["question"] for m in turn if m["role"] == "user"]
    words = re.findall(r"[a-z0-9]+", " ".join(asked).lower())
    return frozenset(tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4)))


def _likeness(one: frozenset[Any], other: frozenset[Any]) -> float:
    return len(one & other) / len(one | other)


def _described(function: Mapping[str, Any]) -> str:
    return f"{function['name']}: {function['description']}".lower()


def _rows(name: str) -> list[dict[str, Any]]:
    return wheels.rows("bfcl_eval", f"data/{name}", install=bfcl_checker.INSTALL)


def write(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """`rows` as JSON lines."""
    lines = (json.dumps(each, ensure_ascii=False) for each in rows)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
