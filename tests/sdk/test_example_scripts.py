"""The two short examples, run as a reader would run them."""

import subprocess
import sys
from pathlib import Path

from prefillshare_agents.testing import FakeServer

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, server: FakeServer) -> str:
    command = [sys.executable, str(EXAMPLES / script), server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plain_openai_client_shares_with_one_header(server: FakeServer) -> None:
    output = run("plain_openai/header.py", server)

    first, second = server.chats
    assert first.sessions == second.sessions != []
    assert "planner: an answer by planner\n  0 of " in output
    assert "critic: an answer by critic\n" in output
    assert second.body["messages"][1] == first.body["messages"][1]


def test_a_session_answers_with_two_roles_and_shows_its_usage(server: FakeServer) -> None:
    server.script(["1. Subtract.", "Right [so far]."])
    output = run("session.py", server)

    assert [chat.body["model"] for chat in server.chats] == ["planner", "critic"]
    assert "Right [so far]." in output
    assert "Session usage" in output
    assert server.sessions == {}
