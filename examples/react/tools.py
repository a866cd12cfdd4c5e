"""The two tools of the example. Both really run."""

import ast
import json
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_core.tools import BaseTool, tool
from langchain_core.utils.function_calling import convert_to_openai_tool

FACTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("facts.json").read_text())
"""Place → `height_m` and `about`."""

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@tool(response_format="content_and_artifact")
def lookup(place: str) -> tuple[str, str]:
    """Give the height of a place."""
    if place not in FACTS:
        raise ValueError(f"no height of {place!r} is known; known: {', '.join(FACTS)}")
    fact = FACTS[place]
    return f"{place} is {fact['height_m']} m high. {fact['about']}", place


@tool
def calculator(expression: str) -> str:
    """Work out an expression."""
    return f"{expression} = {round(evaluate(expression), 2):g}"


def evaluate(expression: str) -> float:
    """Return the value of an expression of numbers, + - * / and parentheses.

    Raises ValueError for anything else, and ZeroDivisionError.
    """
    if len(expression) > 100:  # bounds the parser's recursion
        raise ValueError(f"the expression has {len(expression)} characters; at most 100 are taken")
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return float(_OPERATIONS[type(op)](_value(left), _value(right)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
    raise ValueError(f"{ast.unparse(node)!r} is not allowed; give numbers with + - * /")


def narrowed(tool: BaseTool, argument: str, values: Sequence[str]) -> dict[str, Any]:
    """Return the tool's description for one call, with the values that `argument` may take.

    Guided decoding keeps a strict tool's arguments to its schema.
    """
    spec = convert_to_openai_tool(tool, strict=True)
    spec["function"]["parameters"]["properties"][argument]["enum"] = list(values)
    return spec
