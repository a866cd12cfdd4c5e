"""The paper's training sets (section 4.1, A.1), and how one of their rows becomes one of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Preset:
    """A data set: where it is, how much of it the paper used, and what its rows mean."""

    hub_id: str
    convert: Callable[[Row], dict[str, Any]]
    """From one of its rows to one of ours. Raises ValueError, naming the field."""
    limit: int | None = None
    """Rows in the paper's subset; None is all of them."""
    split: str = "train"
    config: str | None = None
    """The hub's name of a part of the data set."""


def metamathqa(row: Row) -> dict[str, Any]:
    """A question of grade school or competition maths, and the way to its answer."""
    return _dialogue(_text(row, "query"), _text(row, "response"))


def deepmath(row: Row) -> dict[str, Any]:
    """A hard question of maths, and the first of its three solutions."""
    return _dialogue(_text(row, "question"), _text(row, "r1_solution_1"))


def evol_instruct_code(row: Row) -> dict[str, Any]:
    """A programming task and its solution."""
    return _dialogue(_text(row, "instruction"), _text(row, "output"))


def gsm8k(row: Row) -> dict[str, Any]:
    """A word problem, and the way to its answer, which ends with `#### N`."""
    return _dialogue(_text(row, "question"), _text(row, "answer"))


def xlam(row: Row) -> dict[str, Any]:
    """A request, the tools at hand, and the calls that fulfil it."""
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(_listed(row, "tools"))]
    calls = [_call(call, i) for i, call in enumerate(_listed(row, "answers"))]
    if not calls:
        raise ValueError("answers: is empty; there is nothing to learn")
    messages = [
        {"role": "user", "content": _text(row, "query")},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    return {"messages": messages, "tools": tools}


PRESETS: dict[str, Preset] = {
    "metamathqa": Preset("meta-math/MetaMathQA", metamathqa, 40_000),
    "deepmath": Preset("zwhe99/DeepMath-103K", deepmath, 1_000),
    "evol-instruct-code": Preset("nickrosh/Evol-Instruct-Code-80k-v1", evol_instruct_code, 80_000),
    "xlam": Preset("Salesforce/xlam-function-calling-60k", xlam, 60_000),
    "gsm8k": Preset("openai/gsm8k", gsm8k, config="main"),
}


_TYPES = {
    "str": "string",
    "string": "string",
    "int": "integer",
    "integer": "integer",
    "float": "number",
    "number": "number",
    "bool": "boolean",
    "boolean": "boolean",
    "dict": "object",
    "object": "object",
    "list": "array",
    "array": "array",
    "tuple": "array",
    "set": "array",
}


def _dialogue(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def _text(row: Row, key: str) -> str:
    if key not in row:
        keys = ", ".join(map(str, row)) or "none"
        raise ValueError(f"{key}: is missing (the row's keys: {keys})")
    if not isinstance(row[key], str):
        raise ValueError(f"{key}: must be text, not {type(row[key]).__name__}")
    return row[key]


def _listed(row: Row, key: str) -> list[Mapping[str, Any]]:
    """A list of objects, given as such or as JSON text."""
    value: object = row.get(key)
    if not isinstance(value, list):
        try:
            value = json.loads(_text(row, key))
        except json.JSONDecodeError as error:
            raise ValueError(f"{key}: is not JSON ({error.msg})") from None
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise ValueError(f"{key}: must be a list of objects")
    return value


def _tool(tool: Row, where: str) -> dict[str, Any]:
    """An OpenAI tool. xLAM describes parameters by name, in Python's words for types."""
    given = tool.get("parameters") or {}
    if not isinstance(tool.get("name"), str) or not isinstance(given, Mapping):
        raise ValueError(f"{where}: needs a name, and parameters by name")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in given.items():
        if not isinstance(parameter, Mapping):
            raise ValueError(f"{where}.parameters.{name}: must be an object")
        kind = str(parameter.get("type", "str"))
        properties[name] = _schema(kind)
        if parameter.get("description"):
            properties[name]["description"] = parameter["description"]
        if parameter.get("default") is not None:
            properties[name]["default"] = parameter["default"]
        # Few parameters say so themselves. The others may be left out if they have a default.
        optional = "optional" in kind.lower() or "default" in parameter
        if parameter.get("required", not optional):
            required.append(name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    function = {
        "name": tool["name"],
        "description": str(tool.get("description") or ""),
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


def _schema(kind: str) -> dict[str, Any]:
    """JSON schema of a type such as `str`, `List[int], optional` or `Dict[str, Any]`.

    Types without a counterpart are left open.
    """
    name = _without_optional(kind)
    outer, bracket, rest = name.partition("[")
    outer = outer.strip().lower()
    schema: dict[str, Any] = {"type": _TYPES[outer]} if outer in _TYPES else {}
    items = _schema(rest.removesuffix("]")) if bracket and outer in ("list", "set") else {}
    return {**schema, "items": items} if items else schema


def _without_optional(kind: str) -> str:
    """`int` of `int, optional`, `Optional[int]` and `int, default is 3`."""
    name = kind.strip()
    depth = 0
    for position, char in enumerate(name):
        depth += (char in "[(") - (char in "])")
        if char == "," and depth == 0:
            name = name[:position].strip()
            break
    if name.lower().startswith("optional[") and name.endswith("]"):
        name = name[len("optional[") : -1]
    return name


def _call(call: Row, index: int) -> dict[str, Any]:
    arguments = call.get("arguments", {})
    if not isinstance(call.get("name"), str) or not isinstance(arguments, Mapping):
        raise ValueError(f"answers[{index}]: needs a name, and arguments as an object")
    function = {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    # Nine letters or digits: some templates take no other ids.
    return {"id": f"call{index:05d}", "type": "function", "function": function}
