"""Recorded requests become a workload, or the line that cannot is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefillshare_agents._trace import TRACE, trace
from prefillshare_bench import imports
from prefillshare_bench.traces import RecordedCall, Workload, read, write
from prefillshare_server.errors import ConfigError

MESSAGES = [{"role": "user", "content": "Hello"}]


def recorded(paths: list[Path], **options: Any) -> Workload:
    return imports.recorded(paths, **options).workload


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


def said(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation that a user begins."""
    head = [] if system is None else [{"role": "system", "content": system}]
    speakers = ("user", "assistant")
    return head + [{"role": speakers[n % 2], "content": text} for n, text in enumerate(texts)]


def test_requests_without_a_session_join_the_one_that_they_go_on_from(tmp_path: Path) -> None:
    conversations = [
        said("Where is it?", system="You plan."),
        said("Who are you?"),
        said("Where is it?", "North.", "And blue?", system="You write code."),
        said("Where is it?", "North.", "And blue?", system="You judge."),
        said("Who are you?", "A model.", "Thanks."),
    ]
    path = written(tmp_path, *(body(messages=messages) for messages in conversations))
    workload = recorded([path])
    assert [len(session.calls) for session in workload.sessions] == [3, 2]
    first = [call.request["messages"] for call in workload.sessions[0].calls]  # type: ignore[union-attr]
    assert first == [conversations[0], conversations[2], conversations[3]]


def test_who_asks_the_same_again_begins_a_session(tmp_path: Path) -> None:
    """Independent requests of one text are no conversation; another role reads the same context."""
    models = ("planner", "planner", "critic", "planner")
    found = imports.recorded([written(tmp_path, *map(body, models))])
    roles = [[call.role for call in session.calls] for session in found.workload.sessions]
    assert roles == [["planner"], ["planner", "critic"], ["planner"]]
    assert found.joined == 3


def test_a_request_without_a_session_joins_one_with_a_name(tmp_path: Path) -> None:
    named = {"session": "unnamed-1", "body": body(messages=said("Hi"))}
    later = [body(messages=said("Hi", "Hello", "Who?")), body(messages=said("Bye"))]
    workload = recorded([written(tmp_path, named, *later)])
    assert [(s.id, len(s.calls)) for s in workload.sessions] == [("unnamed-1", 2), ("unnamed-2", 1)]


def test_logs_of_several_processes_are_put_in_order_by_their_times(tmp_path: Path) -> None:
    for name, times in (("one", (5, 20)), ("two", (1, 10))):
        (tmp_path / name).mkdir()
        lines = [{"time": at, "session": "a", "body": body(f"at{at}")} for at in times]
        written(tmp_path / name, *lines)
    workload = recorded([tmp_path / name / "trace.jsonl" for name in ("one", "two")])
    assert [call.role for call in workload.sessions[0].calls] == ["at1", "at5", "at10", "at20"]


def test_times_and_roles_may_stand_anywhere_around_a_request(tmp_path: Path) -> None:
    lines = [
        {"session": s, "request": {"ts": at, "agent": "coder", "body": body()}}
        for s, at in (("a", 10), ("b", 12))
    ]
    found = imports.recorded([written(tmp_path, *lines)], role_key="agent")
    assert (found.rate, found.workload.roles) == (0.5, ("coder",))


@pytest.mark.parametrize("key", ["metadata.agent", "agent"])
def test_a_role_may_be_named_by_any_field(tmp_path: Path, key: str) -> None:
    lines = [
        {"session": "a", "agent": agent, "body": body("gpt", metadata={"agent": agent})}
        for agent in ("Planner", "Coder")
    ]
    assert recorded([written(tmp_path, *lines)], role_key=key).roles == ("planner", "coder")


def test_how_fast_sessions_came_and_what_was_left_out_is_told(tmp_path: Path) -> None:
    lines = [{"time": t, "session": s, "body": body()} for s, t in (("a", 100), ("b", 104))]
    embedding = {"path": "/v1/embeddings", "body": {"input": "x"}}
    found = imports.recorded([written(tmp_path, *lines, embedding)])
    assert (found.rate, found.skipped) == (0.25, 1)
    assert "0.25 sessions a second" in found.workload.about
    untimed = imports.recorded([written(tmp_path, body())])
    assert untimed.rate is None


def test_a_session_may_be_named_by_any_field(tmp_path: Path) -> None:
    path = written(tmp_path, body(thread="x"), body(thread="y"))
    assert [s.id for s in recorded([path], session_key="thread").sessions] == ["x", "y"]


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
SURROGATE = '{"session":"a","model":"m","messages":[{"role":"user","content":"\\ud83d"}]}' + "\n"
NAMED = {"session": "a", "body": body()}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "has no chat requests"),
        ([NAMED, "{\n"], ":2: the line: "),
        ([NAMED, {"session": "a", "body": {"messages": MESSAGES}}], ":2: model: None"),
        ([{**NAMED, "time": 1}, {"session": "b", "body": body()}], ":2: has no time"),
        ([{**NAMED, "time": "soon"}], ":1: time: 'soon' is no time"),
        ([{**NAMED, "time": True}], ":1: time: True is no time"),
        ([{"session": "a", "body": body(messages=[])}], ":1: messages: must not be empty"),
        ([{"session": "a", "body": body("base")}], ":1: model: 'base' is the name of a part"),
        (
            ['{"session":"a","model":"m","messages":[{"role":"user","content":"\\ud83d"}]}\n'],
            "half a",
        ),
        ([{**NAMED, "time": float("nan")}], ":1: time: nan is no time"),
        ([{**NAMED, "time": 1e300}], ":1: time: 1e+300 is no time"),
        ([{"session": "", "body": body()}], ":1: the session's name is empty"),
        (
            [{"session": "a", "body": body(messages=[{"role": "user", "content": IMAGE}])}],
            ":1: mes",
        ),
        ([{"session": "a", "body": body(messages=["Hello"])}], ":1: messages[0]: 'Hello' is no"),
        ([NAMED, {"body": body("Planner!")}, {"body": body("planner-")}], "would both be role"),
    ],
    ids=[
        *(
            "empty",
            "json",
            "model",
            "no time",
            "word",
            "bool",
            "no messages",
            "reserved",
            "surrogate",
        ),
        *("nan", "huge"),
        *("unnamed", "image", "no message", "two roles in one"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, lines: list[Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        recorded([written(tmp_path, *lines)])
    assert said in str(error.value)
