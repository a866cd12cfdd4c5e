"""Programs that must not change: the session and the trace come from the environment."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from prefillshare_agents import AsyncOpenAI, OpenAI, Session
from prefillshare_agents.testing import FakeServer

HELLO: Any = [{"role": "user", "content": "hello"}]

PROGRAM = """
from openai import OpenAI

client = OpenAI()
client.chat.completions.create(
    model="planner", messages=[{"role": "user", "content": "hello"}]
)
client.close()
"""


def test_an_unchanged_openai_program_gets_a_session_from_its_environment(
    server: FakeServer,
) -> None:
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": server.url,
        "OPENAI_API_KEY": "local",
        "OPENAI_CUSTOM_HEADERS": "X-Session-ID: order-4711",
    }
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=240)

    assert [chat.sessions for chat in server.chats] == [["order-4711"]]


def test_the_session_of_the_environment_is_that_of_calls_without_another(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFILLSHARE_SESSION", "environment")
    with OpenAI(base_url=server.url, api_key="k") as client:
        client.chat.completions.create(model="planner", messages=HELLO)
        with Session("block"):
            client.chat.completions.create(model="planner", messages=HELLO)
        fixed = client.with_options(session="client")
        fixed.chat.completions.create(model="planner", messages=HELLO)

    assert [chat.sessions for chat in server.chats] == [["environment"], ["block"], ["client"]]


def test_chat_requests_are_traced_as_they_were_sent(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    monkeypatch.setenv("PREFILLSHARE_TRACE", str(trace))
    server.fail(503)  # a retry is no second request
    with OpenAI(base_url=server.url, api_key="k", session="s") as client:
        client.chat.completions.create(
            model="planner", messages=HELLO, extra_body={"min_p": 0.1}, temperature=0
        )
        client.models.list()

    [line] = [json.loads(line) for line in trace.read_text().splitlines()]
    assert (line["session"], line["method"], line["path"]) == ("s", "POST", "/chat/completions")
    assert line["body"] == server.chats[-1].body
    assert trace.stat().st_mode & 0o777 == 0o600


def test_a_forks_request_is_traced_with_its_parent(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    monkeypatch.setenv("PREFILLSHARE_TRACE", str(trace))
    session = Session("trunk", base_url=server.url, messages=HELLO)
    session.fork("branch").chat("critic")
    session.close()

    line = json.loads(trace.read_text())
    assert (line["session"], line["parent"]) == ("branch", "trunk")


async def test_the_async_client_traces_too(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    monkeypatch.setenv("PREFILLSHARE_TRACE", str(trace))
    async with AsyncOpenAI(base_url=server.url, api_key="k") as client:
        await client.chat.completions.create(model="planner", messages=HELLO)

    assert json.loads(trace.read_text())["session"] is None


def test_lines_of_several_threads_stay_whole(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    monkeypatch.setenv("PREFILLSHARE_TRACE", str(trace))
    long: Any = [{"role": "user", "content": "far " * 5000}]

    def work(name: str) -> None:
        with OpenAI(base_url=server.url, api_key="k", session=name) as client:
            client.chat.completions.create(model="planner", messages=long)

    threads = [threading.Thread(target=work, args=(f"s{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    sessions = {json.loads(line)["session"] for line in trace.read_text().splitlines()}
    assert sessions == {f"s{i}" for i in range(8)}


def test_a_trace_that_cannot_be_written_is_no_silent_gap(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFILLSHARE_TRACE", str(tmp_path / "missing" / "trace.jsonl"))
    with (
        OpenAI(base_url=server.url, api_key="k") as client,
        pytest.raises(FileNotFoundError, match=r"trace\.jsonl"),
    ):
        client.chat.completions.create(model="planner", messages=HELLO)
