"""The two tools of the example. Both really run."""

import ast
import json
import operator
from pathlib import Path
from typing import Any

from langchain_core.tools import tool

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
    return described(place, fact["height_m"], fact["about"]), place


def described(place: str, height_m: int, about: str) -> str:
    """Return what a lookup says."""
    return f"{place} is {height_m} m high. {about}".rstrip()


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
