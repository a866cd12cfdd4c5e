"""What counts as a role's job done, in free text."""

import pytest

from examples.specialists.episodes import said, tool_call
from examples.specialists.score import correct, text_of

PLAN = said({"thought": "I need the height of Big Ben", "next": "Big Ben"})
CALL = tool_call("calculator", {"expression": "828 / 96"})
ANSWER = said({"answer": "Burj Khalifa is 8.62 times higher than Big Ben"})
VERDICT = said({"reason": "The result is 8.62 and the answer says 8.6", "verdict": "wrong"})


@pytest.mark.parametrize(
    ("role", "answer", "expected"),
    [
        ("planner", '{"thought": "Hm", "next": "Big Ben"}', PLAN),
        ("planner", 'Here it is:\n```json\n{"next":"Big Ben"}\n```<|im_end|>', PLAN),
        (
            "toolcaller",
            "Now: " + text_of(CALL).replace("\n", ""),
            CALL,
        ),
        ("solver", '{"answer": "8.62 times"}', ANSWER),
        ("critic", '{"reason": "No", "verdict": "wrong"}', VERDICT),
    ],
)
def test_the_wording_is_free(role: str, answer: str, expected: dict[str, object]) -> None:
    assert correct(role, answer, expected)


@pytest.mark.parametrize(
    ("role", "answer", "expected"),
    [
        ("planner", '{"thought": "Big Ben", "next": "Burj Khalifa"}', PLAN),
        ("planner", "Big Ben", PLAN),
        ("planner", '{"next": "Big Ben"', PLAN),
        ("toolcaller", text_of(CALL) + text_of(CALL), CALL),
        ("toolcaller", text_of(CALL).replace("828 / 96", "96 / 828"), CALL),
        ("toolcaller", text_of(CALL).replace("calculator", "lookup"), CALL),
        ("toolcaller", '{"name": "calculator", "arguments": {"expression": "828 / 96"}}', CALL),
        ("solver", '{"answer": "8.26 times"}', ANSWER),
        ("solver", '{"answer": "8.62 times, from 828 m"}', ANSWER),
        ("solver", "8.62", ANSWER),
        ("critic", '{"reason": "wrong", "verdict": "right"}', VERDICT),
        ("critic", '["wrong"]', VERDICT),
        ("critic", "", VERDICT),
    ],
)
def test_what_the_graph_could_not_use_is_wrong(
    role: str, answer: str, expected: dict[str, object]
) -> None:
    assert not correct(role, answer, expected)


def test_a_tool_call_is_written_as_the_model_writes_it() -> None:
    assert text_of(CALL) == (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "828 / 96"}}\n</tool_call>'
    )
