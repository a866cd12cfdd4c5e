"""Any JSONL file as a task: which prompts are asked, and what counts as the same answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from prefillshare_server.config import LayoutSettings
from prefillshare_server.errors import ConfigError
from prefillshare_training.data.rendering import Renderer
from prefillshare_training.evaluate.tasks import Item
from prefillshare_training.evaluate.tasks.exact import Exact


@pytest.fixture(scope="module")
def renderer(base_dir: Path) -> Renderer:
    return Renderer.for_base(base_dir, LayoutSettings())


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def score(match: Any, expected: Any, said: str) -> float:
    [value] = Exact("x", match).score(Item("0", (1,), expected), said).values()
    return value


def test_rows_of_every_form(renderer: Renderer, tmp_path: Path) -> None:
    ask = {"role": "user", "content": "Say hi."}
    path = write(
        tmp_path / "rows.jsonl",
        {"messages": [ask, {"role": "assistant", "content": "hi"}]},
        {"messages": [ask], "answer": "hi"},
        {"prompt": [ask], "answer": "hi", "id": "third"},
        {"prompt": [ask], "completion": "hi"},
        {"prompt": "hello ", "completion": "hi"},
    )
    items = Exact(path).items(renderer)
    assert [item.expected for item in items] == ["hi"] * 5
    assert [item.key for item in items] == ["0", "1", "third", "3", "4"]
    chat = tuple(renderer.prompt([ask]))
    assert [item.prompt_ids for item in items] == [chat] * 4 + [tuple(renderer.encode("hello "))]


def test_the_last_answer_of_a_conversation_is_asked_for(renderer: Renderer, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "2"},
    ]
    [item] = Exact(write(tmp_path / "rows.jsonl", {"messages": messages})).items(renderer)
    sample = renderer.conversation(messages)
    assert (item.expected, item.prompt_ids) == ("2", sample.turns[-1].prompt_ids)


def test_bad_rows_are_named(renderer: Renderer, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\nnonsense\n')
    with pytest.raises(ConfigError) as caught:
        Exact(str(path)).items(renderer)
    assert "line 2: completion: is missing" in str(caught.value)
    assert "line 3: is not JSON" in str(caught.value)


@pytest.mark.parametrize(
    ("match", "expected", "said", "right"),
    [
        ("exact", "a b", " a \n b ", 1),
        ("exact", "a b", "A b", 0),
        ("contains", "Paris", "It is Paris, of course.", 1),
        ("contains", "Paris", "It is Rome.", 0),
        ("number", "1,000", "that makes 1000.0", 1),
        ("number", 7, "7 or 8", 0),
        ("json", {"a": 1, "b": [2]}, 'Sure: {"b": [2], "a": 1}', 1),
        ("json", {"a": 1}, '{"a": 2}', 0),
        ("json", {"a": 1}, "nothing", 0),
        ("json", '{"name": "f", "arguments": {"x": 1}}', call("f", x=1), 1),
        ("json", [{"name": "f", "arguments": {"x": 1}}], call("f", x=1), 1),
        ("json", {"name": "f", "arguments": {"x": 1}}, call("f", x=1), 1),
        ("json", {"name": "Bob", "age": 3}, '{"age": 3, "name": "Bob"}', 1),
        ("json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 4}', 0),
        ("json", [], "It is [].", 1),
        ("json", [{"name": "f", "arguments": {"x": 1}}], call("f", x=2), 0),
    ],
)
def test_scores(match: str, expected: Any, said: str, right: float) -> None:
    assert score(match, expected, said) == right


def test_tool_calls_are_expected_as_they_are_said(renderer: Renderer, tmp_path: Path) -> None:
    function = {"name": "f", "arguments": '{"x": 1}'}
    calling = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }
    row = {"messages": [{"role": "user", "content": "Call f."}, calling]}
    task = Exact(write(tmp_path / "rows.jsonl", row), "json")
    [item] = task.items(renderer)
    assert task.score(item, call("f", x=1)) == {"json": 1.0}


@pytest.mark.parametrize(
    ("match", "answer", "problem"),
    [
        ("number", "none", "'none' has no number"),
        ("json", 5, "no JSON object or list"),
        ("contains", "  ", "is blank"),
    ],
)
def test_an_answer_that_nothing_compares_to_is_refused(
    renderer: Renderer, tmp_path: Path, match: Any, answer: Any, problem: str
) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "a", "answer": answer})
    with pytest.raises(ConfigError, match=f"line 1: answer: {problem}"):
        Exact(path, match).items(renderer)


def test_an_answer_of_null_is_none(renderer: Renderer, tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b", "answer": None}
    [item] = Exact(write(tmp_path / "rows.jsonl", row)).items(renderer)
    assert item.expected == "b"
