"""BFCL as a task: its tools, and its own checker without the providers' SDKs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from prefillshare_server.config import LayoutSettings
from prefillshare_training.data.rendering import Renderer
from prefillshare_training.evaluate.tasks import Item
from prefillshare_training.evaluate.tasks.bfcl import Bfcl, tool


@pytest.fixture(scope="module")
def renderer(base_dir: Path) -> Renderer:
    return Renderer.for_base(base_dir, LayoutSettings())


@pytest.fixture(scope="module")
def questions(renderer: Renderer) -> list[Item]:
    return Bfcl("simple_python").items(renderer)


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_every_item_is_asked_with_its_tools(questions: list[Item], renderer: Renderer) -> None:
    assert len(questions) == 400
    asked = renderer.decode(questions[1].prompt_ids)
    assert '"name": "math_factorial"' in asked
    assert '"type": "object"' in asked
    assert '"dict"' not in asked


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (call("calculate_triangle_area", base=10, height=5), 1),
        (call("calculate_triangle_area", base=10, height=5, unit="units"), 1),
        (json.dumps({"name": "calculate_triangle_area",
                     "arguments": {"base": 10, "height": 5}}), 1),
        (call("calculate_triangle_area", base=5, height=10), 0),
        (call("calculate_triangle_area", base="10", height=5), 0),
        (call("calculate_triangle_area", base=10), 0),
        (call("calculate_triangle_area", base=10, height=5, colour="red"), 0),
        (call("triangle_area", base=10, height=5), 0),
        (call("calculate_triangle_area", base=10, height=5) * 2, 0),
        (2 * (json.dumps({"name": "calculate_triangle_area",
                          "arguments": {"base": 10, "height": 5}}) + "\n"), 0),
        ("The area is 25.", 0),
        ("", 0),
    ],
)  # fmt: skip
def test_scores(answer: str, right: float, questions: list[Item]) -> None:
    assert Bfcl("simple_python").score(questions[0], answer) == {"ast": right}


def test_a_dotted_name_is_called_with_an_underscore(questions: list[Item]) -> None:
    task = Bfcl("simple_python")
    assert task.score(questions[1], call("math_factorial", number=5)) == {"ast": 1.0}


def test_multiple_wants_the_right_function(renderer: Renderer) -> None:
    task = Bfcl("multiple")
    item = task.items(renderer)[0]
    right = call("triangle_properties_get", side1=5, side2=4, side3=3)
    assert task.score(item, right) == {"ast": 1.0}
    assert task.score(item, call("circle_properties_get", radius=5)) == {"ast": 0.0}


@pytest.mark.parametrize("category", ["simple_python", "multiple"])
def test_possible_answers_are_right(category: Any, renderer: Renderer) -> None:
    """The checker accepts what BFCL itself lists, said as a tool call."""
    task = Bfcl(category)
    right = 0
    items = task.items(renderer)
    for item in items:
        [(name, arguments)] = item.expected["possible"][0].items()
        said = _first_possible(arguments)
        right += task.score(item, call(name.replace(".", "_"), **said))["ast"] == 1
    assert right >= 0.98 * len(items)


@pytest.mark.parametrize(
    "wrong", [-5.5, [1], {"a": {"b": [1]}}, None, [{"a": 1}], [[1]], 10**400], ids=repr
)
def test_no_value_breaks_the_checker(wrong: Any, renderer: Renderer) -> None:
    task = Bfcl("simple_python")
    for item in task.items(renderer)[:60]:
        [(name, arguments)] = item.expected["possible"][0].items()
        said = call(name.replace(".", "_"), **dict.fromkeys(arguments, wrong))
        assert task.score(item, said) == {"ast": 0.0}


def test_types_are_translated_on_every_level() -> None:
    given = {
        "name": "a.b",
        "description": "Does.",
        "parameters": {
            "type": "dict",
            "properties": {
                "box": {"type": "tuple", "items": {"type": "float"}, "optional": True},
                "any": {"type": "any", "enum": ["x"], "default": "x"},
                "deep": {"type": "dict", "properties": {"n": {"type": "integer"}}},
            },
            "required": ["box"],
        },
    }
    assert tool(given)["function"] == {
        "name": "a_b",
        "description": "Does.",
        "parameters": {
            "type": "object",
            "properties": {
                "box": {"type": "array", "items": {"type": "number"}},
                "any": {"type": "string", "enum": ["x"], "default": "x"},
                "deep": {"type": "object", "properties": {"n": {"type": "integer"}}},
            },
            "required": ["box"],
        },
    }


def test_the_checker_s_stand_in_does_not_stay(questions: list[Item]) -> None:
    Bfcl("simple_python").score(questions[0], call("f"))
    assert "bfcl_eval.constants.model_config" not in sys.modules


def _first_possible(arguments: dict[str, Any]) -> dict[str, Any]:
    """BFCL lists the possible values of every argument, "" for leaving it out; also inside."""
    given = {}
    for key, values in arguments.items():
        filled = [value for value in values if value != ""]
        if filled:
            given[key] = _inside(filled[0])
    return given


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return _first_possible(value)
    return [_inside(each) for each in value] if isinstance(value, list) else value
