"""A cluster whose processes, ports and disk misbehave. Real processes, without engines."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from prefillshare_server.launch import supervisor
from prefillshare_server.launch.local_cluster import LocalCluster, work_together
from prefillshare_server.launch.process import State, WorkerFailedError, WorkerProcess
from prefillshare_server.router.topology import Decoder, Phase, WorkerEndpoint
from tests.launch.stand_in import cluster_of, serving_stand_in, stand_in


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ATTEMPTS", 2)
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 0.01)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "prefill-0.log"


@asynccontextmanager
async def stranger(body: bytes) -> AsyncIterator[int]:
    """Answers everything with `body`; yields its port."""

    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def failure_to_start(cluster: LocalCluster) -> WorkerFailedError:
    with pytest.raises(WorkerFailedError) as raised:
        async with cluster:
            pass
    return raised.value


async def failure_after_kill(cluster: LocalCluster) -> WorkerFailedError:
    """Kill the started worker and wait until it is given up."""
    os.kill(cluster.pids["prefill-0"], signal.SIGKILL)
    async with asyncio.timeout(120):
        with pytest.raises(WorkerFailedError) as raised:
            await cluster.supervise()
    return raised.value


@pytest.mark.parametrize(
    "body",
    [
        b"Hello",
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[1]",
        b"null",
        b'{"status": "ok"}',
        b'{"pid": 1}',
        b'{"pid": 1, "block_size": "big", "block_bytes": 1, "num_blocks": 1}',
        b'{"pid": 1, "block_size": 16, "block_bytes": 1, "num_blocks": 1}',
    ],
    ids=lambda body: body[:60].decode(errors="replace")[:10],
)
async def test_a_stranger_on_the_port_is_not_taken_for_the_worker(
    monkeypatch: pytest.MonkeyPatch, log: Path, body: bytes
) -> None:
    async with stranger(body) as port:
        spec = stand_in(log, "sh", "-c", "sleep 0.3; exit 3", port=port)
        error = await failure_to_start(cluster_of(monkeypatch, spec))
    assert (error.worker, error.reason) == ("prefill-0", "it ended with status 3")


async def test_a_log_that_cannot_be_written_fails_the_start_by_name(
    monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    log.parent.write_text("not a folder")
    error = await failure_to_start(cluster_of(monkeypatch, serving_stand_in(log)))
    assert error.worker == "prefill-0"
    assert error.reason.startswith("it cannot be started: [Errno ")
    assert str(log.parent) in error.reason


async def test_a_log_that_cannot_be_written_fails_the_restart_by_name(
    monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    async with cluster_of(monkeypatch, serving_stand_in(log)) as cluster:
        shutil.rmtree(log.parent)
        log.parent.write_text("not a folder")
        error = await failure_after_kill(cluster)
    assert error.worker == "prefill-0"
    assert error.reason.startswith("it cannot be started: [Errno ")


async def test_a_worker_whose_logs_were_removed_comes_back(
    monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    back = asyncio.Event()

    def watch(worker: str, state: State, detail: str) -> None:
        if state == "ready":
            back.set()

    async with cluster_of(monkeypatch, serving_stand_in(log)) as cluster:
        shutil.rmtree(log.parent)
        os.kill(before := cluster.pids["prefill-0"], signal.SIGKILL)
        supervising = asyncio.create_task(cluster.supervise(watch))
        try:
            await asyncio.wait_for(back.wait(), 120)
        finally:
            supervising.cancel()
        assert cluster.pids["prefill-0"] != before
        assert log.is_file()


async def test_a_worker_that_outlives_sigkill_is_named_when_the_others_are_gone(
    monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    specs = [serving_stand_in(log.with_name(f"prefill-{index}.log")) for index in range(2)]
    stuck: list[WorkerProcess] = []
    gone_within = WorkerProcess._gone_within

    async def not_gone(
        worker: WorkerProcess, timeout_s: float, family: list[psutil.Process]
    ) -> bool:
        if worker.spec.name == "prefill-0":
            stuck.append(worker)
            return False
        await asyncio.sleep(0.2)
        return await gone_within(worker, timeout_s, family)

    with monkeypatch.context() as patch:
        cluster = cluster_of(patch, *specs)
        await cluster.__aenter__()
        patch.setattr(WorkerProcess, "_gone_within", not_gone)
        with pytest.raises(WorkerFailedError, match=r"prefill-0 failed: .+outlive SIGKILL"):
            await cluster.stop()
        assert not psutil.pid_exists(cluster.pids["prefill-1"])
    await stuck[0].stop()


def worker(phase: Phase, pool: str | None) -> WorkerEndpoint:
    return WorkerEndpoint(f"{phase}-{pool}", phase, pool, "http://w", "m")


@pytest.mark.parametrize(
    ("owner", "pool", "together"),
    [
        (None, "coder", True),
        (None, "lora", True),
        ("coder", "coder", True),
        ("coder", "lora", False),
        ("critic", "coder", False),
        ("critic", "lora", True),
    ],
)
def test_a_roles_own_prefill_worker_works_with_the_workers_that_decode_for_it(
    owner: str | None, pool: str, together: bool
) -> None:
    decoders = {"coder": Decoder("coder", "coder"), "critic": Decoder("lora", "an-adapter")}
    prefill, decode = worker("prefill", owner), worker("decode", pool)
    assert work_together(prefill, decode, decoders) is together
    assert work_together(decode, prefill, decoders) is together
    assert not work_together(prefill, worker("prefill", "critic"), decoders)
