"""The ReAct example on the fake server: its tools, its loop, its report."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from examples.react.__main__ import answer
from examples.react.graph import ATTEMPTS, ROUNDS, build
from examples.react.report import report, success_rates, switches
from examples.react.roles import INSTRUCTIONS, ROLES, TOOLS
from examples.react.tools import FACTS, evaluate
from examples.specialists.live import BASE_ROLE, Success, measure
from prefillshare_agents import Session
from prefillshare_agents.langgraph import Team
from prefillshare_agents.testing import Answer, FakeServer


def plan(step: str) -> str:
    return json.dumps({"thought": "Thinking", "next": step})


def call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"id": f"call_{name}", "type": "function", "function": function}]}


def verdict(word: str) -> str:
    return json.dumps({"reason": "Checked", "verdict": word})


REACT: list[Answer] = [
    plan("Big Ben"),
    call("lookup", place="Big Ben"),
    plan("Burj Khalifa"),
    call("lookup", place="Burj Khalifa"),
    plan("calculate"),
    call("calculator", expression="828 / 96"),
    '{"answer": "It is higher"}',
]


@pytest.fixture
def team(server: FakeServer) -> Iterator[Team]:
    made = Team(server.url, ROLES)
    yield made
    made.close()


def run(team: Team) -> Session:
    console = Console(quiet=True)
    return answer(console, team, build(team), "How much higher is Burj Khalifa than Big Ben?")


def test_a_run_thinks_acts_and_observes_until_it_can_answer(team: Team, server: FakeServer) -> None:
    server.script([*REACT, verdict("right")])
    done = run(team)

    roles = [item.role for item in done.calls]
    assert roles == ["planner", "toolcaller"] * 3 + ["solver", "critic"]
    assert switches(done) == 7
    context = server.chats[-1].body["messages"]
    results = [item["content"] for item in context if item["role"] == "tool"]
    assert results[0].startswith("Big Ben is 96 m high.")
    assert results[2] == "828 / 96 = 8.62"


def test_the_critics_objection_is_heard_once(team: Team, server: FakeServer) -> None:
    server.script([*REACT, verdict("wrong"), '{"answer": "Again"}', verdict("wrong")])

    assert [item.role for item in run(team).calls][6:] == ["solver", "critic", "solver", "critic"]


def test_the_choice_is_left_to_the_roles_and_only_the_form_is_held(
    team: Team, server: FakeServer
) -> None:
    server.script([*REACT, verdict("right")])
    run(team)

    bodies = [chat.body for chat in server.chats]
    plans = [body["response_format"]["json_schema"]["schema"] for body in bodies[0:6:2]]
    for schema in plans:
        assert schema["properties"]["next"]["enum"] == [*FACTS, "calculate"]
    for body in bodies[1:6:2]:
        assert body["tools"] == TOOLS["toolcaller"]
        assert body["tool_choice"] == "required"
        assert body["parallel_tool_calls"] is False
        assert all(tool["function"]["strict"] for tool in body["tools"])


def test_a_verdict_that_was_cut_off_ends_the_run(team: Team, server: FakeServer) -> None:
    server.script([*REACT, '{"reason": "The'])

    assert run(team).calls[-1].role == "critic"


def test_each_role_is_told_the_same_in_every_call(team: Team, server: FakeServer) -> None:
    server.script([*REACT, verdict("right")])
    run(team)

    for chat in server.chats:
        head = chat.body["messages"][0]
        assert head == {"role": "system", "content": INSTRUCTIONS[chat.body["model"]]}


def test_what_a_tool_refuses_is_observed(team: Team, server: FakeServer) -> None:
    server.script([plan("Big Ben"), call("lookup", place="Nowhere"), *REACT, verdict("right")])
    run(team)

    results = [item for item in server.chats[-1].body["messages"] if item["role"] == "tool"]
    assert "no height of 'Nowhere' is known" in results[0]["content"]


def test_without_any_calculation_the_solver_answers_in_the_end(
    team: Team, server: FakeServer
) -> None:
    server.script([plan("Big Ben"), "no call at all"] * ROUNDS)
    server.script(['{"answer": "None"}', verdict("wrong")] * 2)

    roles = [item.role for item in run(team).calls]
    assert roles == ["planner", "toolcaller"] * ROUNDS + ["solver", "critic"] * ATTEMPTS


def test_all_calls_of_a_run_belong_to_one_session_that_ends(team: Team, server: FakeServer) -> None:
    server.script([*REACT, verdict("right")])
    done = run(team)

    assert {tuple(chat.sessions) for chat in server.chats} == {(done.id,)}
    assert server.requests[-1].method == "DELETE"


def test_the_report_sums_the_servers_figures(team: Team, server: FakeServer) -> None:
    server.script([*REACT, verdict("right"), *REACT, verdict("right")])
    runs = [run(team), run(team)]
    figures = report(runs, wall_s=1.5, preemptions=0)

    calls = [item for done in runs for item in done.calls]
    assert list(figures) == [
        "calls",
        "model_switches",
        "sessions",
        "prefill_workers_per_session",
        "prompt_tokens",
        "prefill_computed_tokens",
        "prefill_cached_tokens",
        "per_model_prefill_tokens",
        "decode_prompt_tokens_computed",
        "handoff_bytes",
        "preemptions",
        "wall_s",
        "per_call",
    ]
    assert figures["calls"] == figures["decode_prompt_tokens_computed"] == 16
    assert figures["model_switches"] == 14
    assert figures["sessions"] == 2
    assert figures["prefill_workers_per_session"] == 1
    assert figures["prompt_tokens"] == sum(item.prompt_tokens for item in calls)
    assert (
        figures["prefill_computed_tokens"] + figures["prefill_cached_tokens"]
        == figures["prompt_tokens"]
    )
    unshared = [done.usage.per_model_prefill_tokens for done in runs]
    assert figures["per_model_prefill_tokens"] == sum(unshared) > 0
    assert figures["handoff_bytes"] == sum(item.handoff_bytes for item in calls) > 0
    assert [row["role"] for row in figures["per_call"]] == [item.role for item in calls]
    assert all(row["ttft_s"] > 0 for row in figures["per_call"])


@pytest.mark.parametrize(
    ("expression", "value"),
    [("8849 / 330", 26.815), ("2 * (3 + 4)", 14), ("-2 - 1", -3), ("1.5 + 1", 2.5)],
)
def test_arithmetic_is_worked_out(expression: str, value: float) -> None:
    assert evaluate(expression) == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "2 ** 99", "f(1)", "1 if 1 else 2", "True + 1", "2 +", "1" * 101],
)
def test_anything_but_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"expression|not allowed"):
        evaluate(expression)


def test_success_is_reported_in_percent() -> None:
    found = {"planner": Success(n=8, base=1, specialist=7), "critic": Success(4, None, 4)}

    assert success_rates(found) == {
        "planner": {"n": 8, "base": 12.5, "specialist": 87.5},
        "critic": {"n": 4, "base": None, "specialist": 100.0},
    }


def test_without_the_role_that_is_the_base_only_the_specialists_are_asked(
    server: FakeServer,
) -> None:
    found = measure(server.url, 1)

    assert {role: success.base for role, success in found.items()} == dict.fromkeys(ROLES)
    assert BASE_ROLE not in [chat.body["model"] for chat in server.chats]
