"""The log of a worker over its restarts. Real processes."""

import asyncio
from pathlib import Path

import pytest

from prefillshare_server.launch.process import LONGEST_LOG, WorkerProcess
from tests.launch.stand_in import stand_in


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "prefill-0.log"


async def run(log: Path, *command: str, restart: int) -> WorkerProcess:
    """Start it, and wait for its end."""
    worker = WorkerProcess(stand_in(log, *command), restart=restart)
    try:
        async with asyncio.timeout(120):
            while worker.running:
                await asyncio.sleep(0.01)
    finally:
        await worker.stop()
    return worker


async def test_a_restart_appends(log: Path) -> None:
    for restart, text in enumerate(["first", "second"]):
        await run(log, "echo", text, restart=restart)
    lines = log.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("first", "second")
    assert lines[-2].endswith(": restart 1 of prefill-0 =====")
    assert [path.name for path in log.parent.iterdir()] == ["prefill-0.log"]


async def test_a_long_log_is_set_aside_at_a_restart(log: Path) -> None:
    before = b"x" * (LONGEST_LOG + 1)
    log.write_bytes(before)
    await run(log, "echo", "second", restart=1)
    assert log.with_name("prefill-0.log.1").read_bytes() == before
    assert "x" * 9 not in log.read_text()
    assert log.read_text().endswith(": restart 1 of prefill-0 =====\nsecond\n")


async def test_only_one_log_is_kept_aside(log: Path) -> None:
    for restart in (1, 2):
        log.write_bytes(b"%d" % restart * (LONGEST_LOG + 1))
        await run(log, "true", restart=restart)
    assert log.with_name("prefill-0.log.1").read_bytes()[:1] == b"2"
    names = sorted(path.name for path in log.parent.iterdir())
    assert names == ["prefill-0.log", "prefill-0.log.1"]


async def test_a_log_grows_while_its_worker_runs(log: Path) -> None:
    """It is set aside only at a restart, however long it is."""
    worker = await run(log, "head", "-c", str(LONGEST_LOG + 1), "/dev/zero", restart=0)
    assert log.stat().st_size == LONGEST_LOG + 1
    assert worker.log_tail.startswith("\0")


@pytest.mark.parametrize("length", [100, LONGEST_LOG + 1], ids=["appended", "set aside"])
async def test_the_tail_is_of_the_last_start_only(log: Path, length: int) -> None:
    log.write_bytes(b"x" * length)
    worker = WorkerProcess(stand_in(log, "sleep", "60"), restart=1)
    try:
        assert worker.log_tail == ""
        with log.open("ab") as more:
            more.write(b"now\n")
        assert worker.log_tail == "now\n"
    finally:
        await worker.stop()


async def test_a_log_that_was_removed_hides_nothing_but_itself(log: Path) -> None:
    worker = WorkerProcess(stand_in(log, "sh", "-c", "sleep 0.2; exit 3"))
    log.unlink()
    try:
        async with asyncio.timeout(120):
            while worker.running:
                await asyncio.sleep(0.01)
        assert worker.failure().reason == "it ended with status 3"
    finally:
        await worker.stop()
