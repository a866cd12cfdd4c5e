"""langgraph-supervisor: the same bytes in every process, and one prefix."""

import json
import os
import subprocess
import sys
import warnings
from contextlib import ExitStack
from typing import Any

import pytest

from prefillshare_agents import PrefixBreakWarning
from prefillshare_agents.langgraph import Team
from prefillshare_agents.testing import FakeServer, tool_call

from .supervisor_run import AGENTS, MODES, run


def script(server: FakeServer) -> None:
    turn: list[Any] = [
        tool_call("transfer_to_researcher"),
        tool_call("transfer_to_calculator"),
        "Done.",
    ]
    server.script("supervisor", turn * 2)
    server.script("researcher", [tool_call("search", name="moon"), "384,400 km."] * 2)
    server.script("calculator", [tool_call("compute", expression="x"), "238,855 miles."] * 2)


def test_three_processes_send_the_same_bytes() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(FakeServer()) for _ in range(3)]
        running = []
        for seed, server in enumerate(servers):
            for _ in MODES:
                script(server)
            command = [sys.executable, "-m", "tests.sdk.langgraph.supervisor_run", server.url]
            environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
            running.append(subprocess.Popen(command, env=environment))
        assert [process.wait(timeout=240) for process in running] == [0, 0, 0]
        sent = [[json.dumps(chat.body) for chat in server.chats] for server in servers]

    assert len(sent[0]) == 28
    assert sent[0] == sent[1] == sent[2]


@pytest.mark.parametrize("output_mode", MODES)
def test_a_supervised_team_shares_one_prefix(output_mode: str, server: FakeServer) -> None:
    script(server)
    team = Team(server.url, ["supervisor", *AGENTS])
    with team.session() as session, warnings.catch_warnings():
        warnings.simplefilter("error", PrefixBreakWarning)
        run(team, output_mode)
    team.close()

    assert {chat.sessions[0] for chat in server.chats} == {session.id}
    assert session.usage.calls == 14
    assert set(session.usage.roles) == {"supervisor", "researcher", "calculator"}
    server.assert_shared(0.95)
    server.assert_script_used()
