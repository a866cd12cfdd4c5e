"""Recorded requests are read in every shape that people have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefillshare_server.errors import ConfigError
from prefillshare_server.lint import trace

BODY: dict[str, Any] = {"model": "planner", "messages": [{"role": "user", "content": "Hello"}]}
ANSWER = {"choices": [{"message": {"role": "assistant", "content": "Hi"}}]}


def written(folder: Path, *entries: Any) -> Path:
    path = folder / "trace.jsonl"
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    path.write_text("\n".join(lines) + "\n")
    return path


def sessions(path: Path, **options: Any) -> dict[str | None, list[Any]]:
    index = trace.index([path], **options)
    return {
        name: [dict(call.body) for call in trace.load(lines)]
        for name, lines in index.sessions.items()
    }


@pytest.mark.parametrize(
    "entry",
    [
        BODY,
        {"body": BODY},
        {"request": BODY},
        {"request": {"method": "POST", "url": "https://x/v1/chat/completions", "body": BODY}},
        {"body": json.dumps(BODY)},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": BODY},
        {"time": 1.5, "session": None, "method": "POST", "path": "/chat/completions", "body": BODY},
    ],
    ids=["bare", "body", "request", "http", "text", "batch", "sdk"],
)
def test_a_line_may_have_any_usual_shape(tmp_path: Path, entry: dict[str, Any]) -> None:
    assert sessions(written(tmp_path, entry, "", entry)) == {None: [BODY, BODY]}


@pytest.mark.parametrize(
    "entry",
    [
        {"session": "a", "body": BODY},
        {"headers": {"X-Session-ID": "a"}, "body": BODY},
        {"request": {"headers": {"x-prefillshare-session": "a"}, "body": BODY}},
        {**BODY, "session_id": "a"},
        {**BODY, "prompt_cache_key": "a"},
        {"body": {**BODY, "metadata": {"session_id": "a"}}},
    ],
)
def test_a_session_is_found_where_the_server_looks_for_it(
    tmp_path: Path, entry: dict[str, Any]
) -> None:
    assert list(sessions(written(tmp_path, entry))) == ["a"]


def test_a_field_of_ones_own_may_name_the_session(tmp_path: Path) -> None:
    path = written(tmp_path, {"tags": {"thread": 7}, "body": BODY}, {**BODY, "tags": {"thread": 8}})

    assert list(sessions(path, session_key="tags.thread")) == ["7", "8"]


def test_answers_beside_requests_are_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"body": BODY, "response": ANSWER},
        {"body": BODY, "response": {"status_code": 200, "body": ANSWER}},
        {"body": BODY, "response": "data: …"},
    )
    lines = trace.index([path]).sessions[None]

    message = ANSWER["choices"][0]["message"]
    assert [call.answer for call in trace.load(lines)] == [message, message, None]


def test_other_requests_are_left_out(tmp_path: Path) -> None:
    embedding = {"method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}
    bare = [{"model": "a", "input": "x"}, {"body": {"model": "a", "input": [{"role": "user"}]}}]
    get = {"method": "GET", "path": "/x"}
    index = trace.index([written(tmp_path, embedding, get, *bare, BODY)])

    assert (index.skipped, len(index.sessions[None])) == (4, 1)


def test_sessions_that_fork_are_read_together_in_their_order(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"session": "a", "body": BODY},
        {"session": "x", "body": BODY},
        {"session": "b", "parent": "a", "body": BODY},
        {"session": "a", "body": BODY},
        {"headers": {"X-Session-ID": "c", "X-Parent-Session-ID": "b"}, "body": BODY},
        {"session": "d", "parent": "nobody", "body": BODY},
    )
    families = trace.index([path]).families()

    found = [[line.session for line in family] for family in families]
    assert found == [["a", "b", "a", "c"], ["x"], ["d"]]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{nonsense", "trace.jsonl:2: the line: '{nonsense' is no JSON"),
        ("[1]", "trace.jsonl:2: the line: is a JSON list, not an object"),
        ('{"model": "x"}', "trace.jsonl:2: messages: missing"),
        ('{"body": {"messages": "hi"}}', "trace.jsonl:2: body.messages: 'hi' is no list"),
        ('{"body": null}', "trace.jsonl:2: body: None is no request"),
        ('{"request": {"body": 3}}', "trace.jsonl:2: request.body: 3 is no request"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        trace.index([written(tmp_path, BODY, line)])

    assert said in str(error.value)


def test_of_many_bad_lines_ten_are_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        trace.index([written(tmp_path, *["nonsense"] * 15)])

    assert len(error.value.problems) == 11
    assert "5 more lines are bad" in str(error.value)
