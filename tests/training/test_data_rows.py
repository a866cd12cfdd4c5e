"""Rows are read in three forms; what cannot be trained on is refused by field."""

import re
from typing import Any

import pytest

from prefillshare_training.data.rows import Chat, Raw, parse

USER = {"role": "user", "content": "a question"}
ANSWER = {"role": "assistant", "content": "an answer"}
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": "{}"}}],
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_messages_are_a_conversation() -> None:
    row = parse({"messages": [USER, CALLING], "tools": [TOOL], "id": 7})
    assert row == Chat((USER, CALLING), (TOOL,))


def test_prompt_and_completion_may_be_raw_text() -> None:
    assert parse({"prompt": "a question:", "completion": " yes"}) == Raw("a question:", " yes")


def test_prompt_and_completion_may_be_messages() -> None:
    row = parse({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]})
    assert row == Chat((USER, ANSWER, USER, ANSWER), None, prompt_messages=3)


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": [USER], "completion": "an answer"},
        {"prompt": "a question", "completion": [ANSWER]},
        {"prompt": "a question", "completion": "an answer", "tools": [TOOL]},
    ],
)
def test_text_beside_messages_is_a_message(value: dict[str, Any]) -> None:
    tools = tuple(value.get("tools", ())) or None
    assert parse(value) == Chat((USER, ANSWER), tools, prompt_messages=1)


def test_tables_may_hold_empty_columns_and_tools_as_text() -> None:
    value = {"messages": [USER, ANSWER], "prompt": None, "tools": '[{"function": {"name": "add"}}]'}
    assert parse(value) == Chat((USER, ANSWER), ({"function": {"name": "add"}},))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([1], "a row must be an object, not [1]"),
        ({}, "has neither messages nor prompt and completion (its keys: none)"),
        (
            {"text": "a", "label": 1},
            "has neither messages nor prompt and completion (its keys: text, label)",
        ),
        ({"prompt": "a"}, "completion: is missing"),
        ({"completion": "a"}, "prompt: is missing"),
        (
            {"messages": [USER, ANSWER], "prompt": "a"},
            "has both messages and prompt or completion; write one of the two",
        ),
        ({"prompt": "a", "completion": ""}, "completion: is empty; there is nothing to learn"),
        ({"prompt": 3, "completion": "a"}, "prompt: must be a list of messages, not 3"),
        ({"messages": "hello"}, 'messages: must be a list of messages, not "hello"'),
        ({"messages": []}, "messages: must not be empty; send at least one message"),
        ({"messages": [USER, "hello"]}, "messages[1]: 'hello' is no message"),
        ({"messages": [USER, {"role": 3}]}, "messages[1].role: 3 is no role"),
        ({"messages": [{"role": "human", "content": "a"}, ANSWER]}, "messages[0].role: 'human' is"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: 3 is no text"),
        (
            {"messages": [USER, {"role": "assistant", "content": " \n"}]},
            "messages[1].content: is empty; there is nothing to learn",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": ""}]}]},
            "messages[1].content: is empty; there is nothing to learn",
        ),
        (
            {"messages": [USER, ANSWER, USER]},
            "messages[2].role: the last message is by 'user'; it must be the assistant's answer",
        ),
        ({"prompt": [USER], "completion": [USER]}, "completion[0].role: the last message is by"),
        ({"prompt": [{"role": 1}], "completion": "a"}, "prompt[0].role: 1 is no role"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "add"}]}]},
            "messages[1].tool_calls[0].function: needs a name and arguments",
        ),
        ({"messages": [USER, ANSWER], "tools": {}}, "tools: must be a list of tools, not {}"),
        ({"messages": [USER, ANSWER], "tools": "["}, 'tools: "[" is no JSON'),
        ({"messages": [USER, ANSWER], "tools": [{"name": "add"}]}, 'tools[0]: {"name": "add"} is'),
        (
            {"prompt": "half \ud83d", "completion": "a"},
            "prompt: '\\ud83d' is half of a character; write all of it",
        ),
        ({"prompt": "a", "completion": b"a"}, "completion: holds what is no JSON"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_field(value: object, problem: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(problem)):
        parse(value)
