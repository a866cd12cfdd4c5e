"""The paper's data sets become conversations."""

import json
from typing import Any

import pytest

from prefillshare_training.data.presets import PRESETS
from prefillshare_training.data.rows import Chat, parse

GIVEAWAYS = {
    "query": "Where can I find live giveaways for beta access and games?",
    "answers": '[{"name": "giveaways", "arguments": {"type": "beta"}}, '
    '{"name": "giveaways", "arguments": {"type": "gäme", "most": 3}}]',
    "tools": json.dumps(
        [
            {
                "name": "giveaways",
                "description": "Live giveaways.",
                "parameters": {
                    "type": {"description": "Their kind.", "type": "str"},
                    "most": {"description": "How many.", "type": "int, optional", "default": 5},
                    "after": {"type": "str", "default": ""},
                },
            }
        ]
    ),
}


@pytest.mark.parametrize(
    ("preset", "row"),
    [
        ("metamathqa", {"query": "Q?", "response": "A.", "type": "GSM_Rephrased"}),
        ("deepmath", {"question": "Q?", "r1_solution_1": "A.", "r1_solution_2": "B."}),
        ("evol-instruct-code", {"instruction": "Q?", "output": "A."}),
        ("gsm8k", {"question": "Q?", "answer": "A."}),
    ],
)
def test_a_question_and_its_answer(preset: str, row: dict[str, Any]) -> None:
    asked = ({"role": "user", "content": "Q?"}, {"role": "assistant", "content": "A."})
    assert parse(PRESETS[preset].convert(row)) == Chat(asked)


def test_the_result_of_a_word_problem_is_kept() -> None:
    row = {"question": "2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
    assert PRESETS["gsm8k"].convert(row)["messages"][1]["content"] == row["answer"]


def test_a_request_becomes_tools_and_one_answer_of_calls() -> None:
    row = parse(PRESETS["xlam"].convert(GIVEAWAYS))
    parameters = {
        "type": "object",
        "properties": {
            "type": {"type": "string", "description": "Their kind."},
            "most": {"type": "integer", "description": "How many.", "default": 5},
            "after": {"type": "string", "default": ""},
        },
        "required": ["type"],
    }
    function = {"name": "giveaways", "description": "Live giveaways.", "parameters": parameters}
    calls = [
        {"name": "giveaways", "arguments": '{"type": "beta"}'},
        {"name": "giveaways", "arguments": '{"type": "gäme", "most": 3}'},
    ]
    assert row == Chat(
        (
            {"role": "user", "content": GIVEAWAYS["query"]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": f"call0000{i}", "type": "function", "function": call}
                    for i, call in enumerate(calls)
                ],
            },
        ),
        ({"type": "function", "function": function},),
    )


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        ("str", {"type": "string"}),
        ("int, optional", {"type": "integer"}),
        ("Optional[float]", {"type": "number"}),
        ("bool, default is False", {"type": "boolean"}),
        ("List[int]", {"type": "array", "items": {"type": "integer"}}),
        (
            "List[List[str]], optional",
            {"type": "array", "items": {"type": "array", "items": {"type": "string"}}},
        ),
        ("List[Union[int, float]]", {"type": "array"}),
        ("Tuple[float, float]", {"type": "array"}),
        ("Dict[str, int]", {"type": "object"}),
        ("list", {"type": "array"}),
        ("Callable[[float], float]", {}),
        ("Any", {}),
    ],
)
def test_types_become_json_schema(kind: str, schema: dict[str, Any]) -> None:
    tool = {"name": "f", "parameters": {"p": {"type": kind}}}
    row = PRESETS["xlam"].convert(GIVEAWAYS | {"tools": [tool]})
    assert row["tools"][0]["function"]["parameters"]["properties"]["p"] == schema


@pytest.mark.parametrize(
    ("parameter", "required"),
    [
        ({"type": "str"}, True),
        ({"type": "str, optional"}, False),
        ({"type": "Optional[str]"}, False),
        ({"type": "str", "default": "a"}, False),
        ({"type": "str", "default": "a", "required": True}, True),
        ({"type": "str", "required": False}, False),
    ],
)
def test_what_must_be_given(parameter: dict[str, Any], required: bool) -> None:
    tool = {"name": "f", "parameters": {"p": parameter}}
    row = PRESETS["xlam"].convert(GIVEAWAYS | {"tools": [tool]})
    parameters = row["tools"][0]["function"]["parameters"]
    assert parameters.get("required", []) == (["p"] if required else [])


@pytest.mark.parametrize(
    ("preset", "row", "problem"),
    [
        ("gsm8k", {"question": "Q?"}, r"answer: is missing \(the row's keys: question\)"),
        ("gsm8k", {"question": 3, "answer": "A."}, "question: must be text, not int"),
        ("xlam", GIVEAWAYS | {"tools": "[{"}, "tools: is not JSON"),
        ("xlam", GIVEAWAYS | {"tools": '["f"]'}, "tools: must be a list of objects"),
        ("xlam", GIVEAWAYS | {"answers": "[]"}, "answers: is empty; there is nothing to learn"),
        ("xlam", GIVEAWAYS | {"answers": '[{"arguments": {}}]'}, r"answers\[0\]: needs a name"),
        ("xlam", GIVEAWAYS | {"tools": '[{"parameters": {}}]'}, r"tools\[0\]: needs a name"),
        (
            "xlam",
            GIVEAWAYS | {"tools": '[{"name": "f", "parameters": {"p": 3}}]'},
            r"tools\[0\].parameters.p: must be an object",
        ),
    ],
)
def test_rows_of_another_shape_are_refused_by_field(
    preset: str, row: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=f"^{problem}"):
        PRESETS[preset].convert(row)


def test_subsets_are_the_papers() -> None:
    assert {name: preset.limit for name, preset in PRESETS.items()} == {
        "metamathqa": 40_000,
        "deepmath": 1_000,
        "evol-instruct-code": 80_000,
        "xlam": 60_000,
        "gsm8k": None,
    }
