"""What the experiments train on: right answers, and nothing of the test."""

import random
from pathlib import Path
from typing import Any

from benchmarks.accuracy import arithmetic, tool_calls
from prefillshare_server.config import LayoutSettings
from prefillshare_training.data import Renderer


def _item(question: str, function: str = "get_weather") -> dict[str, Any]:
    parameters = {"type": "dict", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    described = {"name": function, "description": "Says it.", "parameters": parameters}
    return {
        "id": question,
        "question": [[{"role": "user", "content": question}]],
        "function": [described],
    }


def test_sums_are_right_and_written_from_the_last_digit() -> None:
    rows, _ = arithmetic.additions(500, 10, random.Random(1))
    for row in rows:
        a, b = row["prompt"].removesuffix(" =").replace(" ", "").split("+")
        assert int(row["completion"].replace(" ", "")[::-1]) == int(a) + int(b)


def test_no_sum_of_the_test_is_learned() -> None:
    # So many rows that chance alone would repeat some.
    rows, held_out = arithmetic.additions(20_000, 1_000, random.Random(2))
    learned = {row["prompt"] for row in rows}
    assert len(held_out) == 1_000
    assert learned.isdisjoint(row["prompt"] for row in held_out)


def test_each_word_is_one_token(tmp_path: Path) -> None:
    arithmetic.write_model(tmp_path, seed=3)
    renderer = Renderer.for_base(tmp_path, LayoutSettings())
    [row], _ = arithmetic.additions(1, 0, random.Random(3))
    [turn] = renderer.text(row["prompt"], row["completion"]).turns
    assert len(turn.prompt_ids) == arithmetic.PROMPT_TOKENS
    assert len(turn.completion_ids) == 5  # four digits and the end
    assert turn.completion_ids[-1] in renderer.stop_ids
    assert arithmetic.WORDS.index(arithmetic.UNKNOWN) not in turn.prompt_ids + turn.completion_ids


def test_what_is_like_a_test_item_is_left_out() -> None:
    test = [_item("What is the weather in Paris, France today?", "weather")]
    found = [
        _item("what is the WEATHER in Paris France today"),  # the same question
        _item("Please, what is the weather in Paris, France today?"),  # nearly the same
        _item("Book me a table for two at eight.", "weather"),  # the same function
        _item("Play some jazz in the kitchen, and not too loud.", "play"),
    ]
    assert tool_calls.without_overlap(found, test) == found[3:]


def test_the_answer_to_learn_is_the_first_right_one_without_optional_arguments() -> None:
    truth = [
        {
            "geo.find": {
                "city": ["Paris", "paris"],
                "unit": ["metric", ""],
                "where": [{"lat": [1.5, 2], "label": ["", "x"]}],
                "tags": [["a", "b"]],
            }
        }
    ]
    row = tool_calls.row(_item("Where is it?", "geo.find"), truth)
    [call] = row["messages"][-1]["tool_calls"]
    # Names have no dots for OpenAI, so in the evaluation they have none either.
    assert call["function"] == {
        "name": "geo_find",
        "arguments": {"city": "Paris", "where": {"lat": 1.5}, "tags": ["a", "b"]},
    }
    assert row["tools"][0]["function"]["name"] == "geo_find"
    assert row["tools"][0]["function"]["parameters"]["type"] == "object"
