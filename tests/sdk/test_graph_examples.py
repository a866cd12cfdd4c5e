"""The example graphs on the fake server: the ways through them that no recorded run takes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from examples.react.graph import ATTEMPTS, ROUNDS
from examples.react.roles import ROLES
from examples.reflexion.graph import ATTEMPTS as TRIES
from examples.reflexion.graph import build as build_reflexion
from examples.running import check_server, read, run
from examples.supervisor.graph import build as build_supervisor
from examples.swarm.graph import build as build_swarm
from prefillshare_agents.langgraph import Team
from prefillshare_agents.testing import FakeServer

GUESS = json.dumps({"answer": "It is higher"})
WRONG = json.dumps({"reason": "Checked", "verdict": "wrong"})
RIGHT = json.dumps({"reason": "Checked", "verdict": "right"})


def plan(step: str) -> str:
    return json.dumps({"thought": "Thinking", "next": step})


def call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"id": f"call_{name}", "type": "function", "function": function}]}


DIVIDE = call("calculator", expression="828 / 96")


@pytest.fixture
def team(server: FakeServer) -> Iterator[Team]:
    made = Team(server.url, ROLES)
    yield made
    made.close()


def roles_of(graph: Any, team: Team, *then: str) -> list[str]:
    """Run a graph; return whose calls it made."""
    session = run(graph, team, ["How high is it?", *then], Console(quiet=True))
    return [item.role for item in session.calls]


def test_reflexion_gives_up_after_some_attempts(team: Team, server: FakeServer) -> None:
    server.script([*[GUESS, plan("Big Ben")] * (TRIES - 1), GUESS])

    assert roles_of(build_reflexion(team), team) == [*["solver", "planner"] * (TRIES - 1), "solver"]


def test_a_rejected_attempt_is_not_remembered(team: Team, server: FakeServer) -> None:
    server.script([GUESS, plan("calculate"), DIVIDE, GUESS, WRONG, plan("calculate"), DIVIDE])
    server.script([GUESS, RIGHT])

    assert roles_of(build_reflexion(team), team)[-2:] == ["solver", "critic"]
    said = [message.get("content") for message in server.chats[-1].body["messages"]]
    assert said.count(GUESS) == 1
    assert WRONG not in said
    assert said.count(plan("calculate")) == 2


def test_a_wrong_answer_goes_back_to_the_swarms_solver_once(team: Team, server: FakeServer) -> None:
    server.script([plan("calculate"), DIVIDE, *[GUESS, WRONG] * ATTEMPTS])

    assert roles_of(build_swarm(team), team)[2:] == ["solver", "critic"] * ATTEMPTS


def test_the_swarms_last_speaker_hears_the_user_first(team: Team, server: FakeServer) -> None:
    server.script([plan("calculate"), DIVIDE, GUESS, RIGHT, RIGHT])

    assert roles_of(build_swarm(team), team, "Sure?")[3:] == ["critic", "critic"]


def test_what_a_tool_refuses_is_handed_back_to_the_planner(team: Team, server: FakeServer) -> None:
    server.script([plan("Big Ben"), call("lookup", place="Nowhere"), plan("calculate"), DIVIDE])
    server.script([GUESS, RIGHT])

    assert roles_of(build_swarm(team), team)[2] == "planner"
    said = [message.get("content") for message in server.chats[2].body["messages"]]
    assert str(said[-1]).startswith("Error: no height of 'Nowhere' is known")


def test_the_supervisor_stops_looking_up_places(team: Team, server: FakeServer) -> None:
    for _ in range(ROUNDS):
        server.script([plan("Big Ben"), call("lookup", place="Big Ben")])
    server.script([plan("Big Ben"), DIVIDE, GUESS, RIGHT])

    roles = roles_of(build_supervisor(team), team)
    assert roles == [*["planner", "toolcaller"] * (ROUNDS + 1), "solver", "critic"]


def test_the_checker_reads_nothing_but_the_calculation(team: Team, server: FakeServer) -> None:
    server.script([plan("Big Ben"), call("lookup", place="Big Ben")])
    server.script([plan("calculate"), DIVIDE, GUESS, RIGHT])

    assert roles_of(build_supervisor(team), team)[-1] == "critic"
    said = [message["content"] for message in server.chats[-1].body["messages"][1:]]
    assert said == ["How high is it?", f"828 / 96 = 8.62\n{GUESS}"]


def test_each_conversation_of_a_file_has_a_number_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "One?", "then": ["Sure?"]}\n\n{"question": "Two?"}\n')

    assert read(file, 12345678) == [["Task 12345678. One?", "Sure?"], ["Task 23456789. Two?"]]


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"answer": "42"}\n')

    with pytest.raises(typer.BadParameter, match="each line needs a JSON object with `question`"):
        read(file, None)


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(typer.BadParameter, match=r"no server answers at http://127\.0\.0\.1:9/v1"):
        check_server("http://127.0.0.1:9/v1", ROLES)
