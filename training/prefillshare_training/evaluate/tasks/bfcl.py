"""The Berkeley Function Calling Leaderboard: call the right function with the right arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from prefillshare_training.evaluate.tasks import bfcl_checker, wheels
from prefillshare_training.evaluate.tasks.task import Item
from prefillshare_training.evaluate.tasks.text import tool_calls

if TYPE_CHECKING:
    from prefillshare_training.data.rendering import Renderer

# BFCL's words for types, as its own harness translates them for OpenAI's tools.
_TYPES = {
    "dict": "object",
    "float": "number",
    "double": "number",
    "tuple": "array",
    "list": "array",
    "bool": "boolean",
    "any": "string",
}
_NOT_JSON_SCHEMA = ("optional",)


@dataclass(frozen=True)
class Bfcl:
    """One of its single-turn Python categories, with the data and the checker of its wheel."""

    category: Literal["simple_python", "multiple"]
    max_tokens: int = 256

    @property
    def name(self) -> str:
        """For example ``bfcl-simple-python``."""
        return "bfcl-" + self.category.replace("_", "-")

    def items(self, renderer: Renderer) -> list[Item]:
        """The question, with the item's functions as OpenAI tools."""
        file = f"BFCL_v4_{self.category}.json"
        questions = wheels.rows("bfcl_eval", f"data/{file}", install=bfcl_checker.INSTALL)
        answers = wheels.rows(
            "bfcl_eval", f"data/possible_answer/{file}", install=bfcl_checker.INSTALL
        )
        possible = {row["id"]: row["ground_truth"] for row in answers}
        found = []
        for row in questions:
            [messages] = row["question"]
            tools = [tool(function) for function in row["function"]]
            expected = {"functions": row["function"], "possible": possible[row["id"]]}
            found.append(Item(row["id"], tuple(renderer.prompt(messages, tools)), expected))
        return found

    def score(self, item: Item, text: str) -> Mapping[str, float]:
        """``ast``: whether BFCL's checker accepts the calls."""
        calls = tool_calls(text)
        if calls is None:
            return {"ast": 0.0}
        named = [{call.name: call.arguments} for call in calls]
        accepted = bfcl_checker.matches(
            item.expected["functions"], named, item.expected["possible"], self.category
        )
        return {"ast": float(accepted)}


def tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """BFCL's description of a function as an OpenAI tool; names there have no dots."""
    return {
        "type": "function",
        "function": {
            "name": function["name"].replace(".", "_"),
            "description": function["description"],
            "parameters": _schema(function["parameters"]),
        },
    }


def _schema(given: Mapping[str, Any]) -> dict[str, Any]:
    """JSON schema: BFCL's types translated on every level, all else kept."""
    schema = {key: value for key, value in given.items() if key not in _NOT_JSON_SCHEMA}
    kind = given.get("type")
    if isinstance(kind, str):
        schema["type"] = _TYPES.get(kind, kind)
    if isinstance(given.get("properties"), Mapping):
        schema["properties"] = {name: _schema(each) for name, each in given["properties"].items()}
    if isinstance(given.get("items"), Mapping):
        schema["items"] = _schema(given["items"])
    return schema
