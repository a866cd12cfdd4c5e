"""Recorded requests become a workload, or the line that cannot is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefillshare_agents._trace import TRACE, trace
from prefillshare_bench.imports import recorded
from prefillshare_bench.traces import RecordedCall, read, write
from prefillshare_server.errors import ConfigError

MESSAGES = [{"role": "user", "content": "Hello"}]


def body(model: str = "planner", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": MESSAGES, **fields}


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "trace.jsonl"
    path.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    )
    return path


def answers(folder: Path, *lines: Any, **options: Any) -> list[int]:
    workload = recorded([written(folder, *lines)], **options)
    return [call.answer for session in workload.sessions for call in session.calls]


def test_what_the_sdk_traces_becomes_a_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACE, str(tmp_path / "t.jsonl"))
    trace("one", None, "/chat/completions", body(max_tokens=9))
    trace("two", None, "/chat/completions", body("critic"))
    trace("one", None, "/chat/completions", body("critic", tools=[{"type": "function"}]))
    workload = recorded([tmp_path / "t.jsonl"], name="mine", seed=3)
    assert (workload.name, workload.seed, workload.roles) == ("mine", 3, ("planner", "critic"))
    one, two = workload.sessions
    assert (one.id, two.id) == ("one", "two")
    assert one.calls == (
        RecordedCall(role="planner", request={"messages": MESSAGES, "max_tokens": 9}, answer=9),
        RecordedCall(
            role="critic",
            request={"messages": MESSAGES, "tools": [{"type": "function"}]},
            answer=128,
        ),
    )
    assert len(two.calls) == 1


def test_an_imported_workload_is_read_as_it_was_written(tmp_path: Path) -> None:
    workload = recorded([written(tmp_path, {"session": "a", "body": body()})])
    write(workload, tmp_path / "w.jsonl")
    assert read(tmp_path / "w.jsonl") == workload


@pytest.mark.parametrize("field", ["time", "timestamp", "created"])
def test_sessions_arrive_as_they_were_logged(tmp_path: Path, field: str) -> None:
    begun = [("b", 1030), ("a", 1000), ("b", 1040), ("c", 1090)]
    lines = [{field: at, "session": session, "body": body()} for session, at in begun]
    workload = recorded([written(tmp_path, *lines)])
    assert [(s.id, s.arrival) for s in workload.sessions] == [
        ("a", 0.0),
        ("b", round(30 / 45, 6)),
        ("c", 2.0),
    ]


@pytest.mark.parametrize(
    "times",
    [
        ("2026-01-01T00:00:00Z", "2026-01-01T00:00:10+00:00"),
        (1_767_225_600_000, 1_767_225_610_000),
        (5, 5),
    ],
    ids=["iso", "milliseconds", "at once"],
)
def test_times_may_be_written_in_any_usual_way(tmp_path: Path, times: tuple[Any, Any]) -> None:
    lines = [{"time": t, "session": s, "body": body()} for s, t in zip("ab", times, strict=True)]
    arrivals = [session.arrival for session in recorded([written(tmp_path, *lines)]).sessions]
    assert arrivals == ([0.0, 0.0] if times == (5, 5) else [0.0, 1.0])


def test_without_times_sessions_arrive_at_random(tmp_path: Path) -> None:
    path = written(tmp_path, *({"session": s, "body": body()} for s in "abc"))
    arrivals = [session.arrival for session in recorded([path], seed=1).sessions]
    assert arrivals == sorted(set(arrivals))
    assert arrivals != [session.arrival for session in recorded([path], seed=2).sessions]


def test_answers_are_as_long_as_the_log_says(tmp_path: Path) -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 7}}
    lines = [
        {"session": "a", "body": body(max_tokens=50), "response": usage},
        {"session": "a", "body": body(), "response": {"status_code": 200, "body": usage}},
        {"session": "a", "body": body(), "response": json.dumps(usage)},
        {"session": "a", "body": body(max_tokens=50)},
        {"session": "a", "body": body(max_completion_tokens=60)},
        {"session": "a", "body": body(), "response": "not recorded"},
    ]
    assert answers(tmp_path, *lines) == [7, 7, 7, 50, 60, 128]
    assert answers(tmp_path, *lines, answer=5, longest_answer=55) == [7, 7, 7, 50, 55, 5]


def test_a_session_may_be_named_by_any_field(tmp_path: Path) -> None:
    path = written(tmp_path, body(thread="x"), body(thread="y"))
    assert [s.id for s in recorded([path], session_key="thread").sessions] == ["x", "y"]


NAMED = {"session": "a", "body": body()}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "has no chat requests"),
        ([NAMED, "{\n"], ":2: the line: "),
        ([NAMED, {"body": body()}], ":2: the request belongs to no session"),
        ([NAMED, {"session": "a", "body": {"messages": MESSAGES}}], ":2: model: None"),
        ([{**NAMED, "time": 1}, {"session": "b", "body": body()}], ":2: has no time"),
        ([{**NAMED, "time": "soon"}], ":1: time: 'soon' is no time"),
        ([{**NAMED, "time": True}], ":1: time: True is no time"),
    ],
    ids=["empty", "json", "session", "model", "no time", "word", "bool"],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, lines: list[Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        recorded([written(tmp_path, *lines)])
    assert said in str(error.value)
