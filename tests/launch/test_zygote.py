"""Workers forked by a process that has imported vLLM. Real processes; real engines where marked."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import httpx
import psutil
import pytest

from prefillshare_server.config import Cluster
from prefillshare_server.launch import local_cluster, zygote
from prefillshare_server.launch.hardware import Hardware
from prefillshare_server.launch.plan import WorkerSpec, plan
from prefillshare_server.launch.process import WorkerFailedError, WorkerProcess
from prefillshare_server.launch.zygote import Zygote
from tests.launch.stand_in import cluster_of, serving_stand_in
from tests.served import Served, serve_in_thread

CLUSTER = Cluster.model_validate(
    {
        "base": {"model": "tiny-base"},
        "roles": {"solver": {"model": "tiny-a"}},
        "kv": {"blocks": 64},
        "max_model_len": 1024,
        # The tiny decoders are drawn, not trained.
        "allow_untrained": True,
    }
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a fork may take long; workers would then start alone."""
    monkeypatch.setattr(zygote, "FORK_S", 120.0)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more, workers have several threads each and are not forked."""
    machine = Hardware(on_cpu=True, cores=2, memory_bytes=16 << 30)
    monkeypatch.setattr(Hardware, "detect", lambda: machine)


@pytest.fixture
def spec(two_cores: None, tmp_path: Path) -> WorkerSpec:
    """A worker that ends at once: vLLM does not know its argument."""
    [found, _] = plan(CLUSTER, log_dir=tmp_path)
    return replace(found, argv=("--no-such-argument",))


@pytest.fixture
def children() -> Iterator[Callable[[], set[psutil.Process]]]:
    """Processes below this one that the test has started; it leaves none."""
    before = set(psutil.Process().children(recursive=True))

    def since() -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True)) - before

    yield since
    assert since() == set()


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    folder = tmp_path_factory.mktemp("zygote")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        [first, _] = plan(CLUSTER, log_dir=folder)
        started = Zygote(first, folder / "zygote.log")
    try:
        assert asyncio.run(asyncio.wait_for(started.ready(), 240)), (
            folder / "zygote.log"
        ).read_text()
        yield started
    finally:
        started.stop()


async def ended(worker: WorkerProcess) -> WorkerProcess:
    async with asyncio.timeout(240):
        while worker.running:
            await asyncio.sleep(0.01)
    return worker


async def test_a_worker_is_a_child_of_the_launcher_in_a_session_of_its_own(
    forking: Zygote, spec: WorkerSpec
) -> None:
    worker = WorkerProcess(spec, zygote=forking)
    try:
        process = psutil.Process(worker.pid)
        assert process.ppid() == os.getpid()
        assert os.getpgid(worker.pid) == os.getsid(worker.pid) == worker.pid
        # It has been let go on; on a busy machine it has come to its end by now.
        ended = process.status() == psutil.STATUS_ZOMBIE
        assert not ended or "--no-such-argument" in worker.failure().reason
    finally:
        await worker.stop()
    assert not psutil.pid_exists(worker.pid)


async def test_how_a_worker_ended_is_told_as_if_it_had_been_started_alone(
    forking: Zygote, spec: WorkerSpec
) -> None:
    spec.log.write_text("what came before\n")
    worker = await ended(WorkerProcess(spec, restart=1, zygote=forking))
    forked = worker.failure().reason
    await worker.stop()
    assert spec.log.read_text().startswith("what came before\n")
    alone = await ended(WorkerProcess(replace(spec, log=spec.log.with_name("alone.log"))))
    assert forked == alone.failure().reason
    assert "--no-such-argument" in forked
    await alone.stop()


@pytest.mark.parametrize("columns", [None, "120"], ids=["taken away", "changed"])
async def test_a_worker_has_the_launchers_environment_of_its_start(
    forking: Zygote, spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    """Shown by how wide its help is; it was 200 columns when vLLM was imported."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    worker = await ended(WorkerProcess(replace(spec, argv=("--help",)), zygote=forking))
    await worker.stop()
    usage = spec.log.read_text().partition("usage:")[2].partition("\n\n")[0].splitlines()
    width = int(columns or 80)
    assert width - 40 < median(map(len, usage)) <= width


@pytest.mark.usefixtures("children")
async def test_without_vllm_there_is_none_and_workers_start_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(zygote, "_MODULE", "no.such.module")
    monkeypatch.setattr(local_cluster, "can_fork", lambda _: True)
    stand_in = serving_stand_in(tmp_path / "logs" / "prefill-0.log")
    async with cluster_of(monkeypatch, stand_in) as cluster:
        assert psutil.pid_exists(cluster.pids["prefill-0"])
    assert "no.such.module" in (tmp_path / "logs" / "zygote.log").read_text()


async def test_one_that_never_gets_ready_is_given_up_for_workers_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def never(_: Zygote) -> bool:
        await asyncio.sleep(60)
        return True

    monkeypatch.setattr(Zygote, "ready", never)
    monkeypatch.setattr(local_cluster, "can_fork", lambda _: True)
    monkeypatch.setattr(local_cluster, "_IMPORT_S", 0.2)
    stand_in = serving_stand_in(tmp_path / "logs" / "prefill-0.log")
    async with cluster_of(monkeypatch, stand_in) as cluster:
        assert psutil.pid_exists(cluster.pids["prefill-0"])


async def test_a_log_folder_that_cannot_be_made_fails_by_the_name_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_cluster, "can_fork", lambda _: True)
    (tmp_path / "logs").write_text("not a folder")
    stand_in = serving_stand_in(tmp_path / "logs" / "prefill-0.log")
    with pytest.raises(WorkerFailedError, match="worker prefill-0 failed: it cannot be started"):
        async with cluster_of(monkeypatch, stand_in):
            pass


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that reads its orders and never says that it is ready."""
    monkeypatch.setattr(zygote, "_MODULE", "json.tool")


@pytest.mark.usefixtures("silent")
def test_one_that_was_killed_forks_no_more(spec: WorkerSpec, tmp_path: Path) -> None:
    started = Zygote(spec, tmp_path / "zygote.log")
    os.kill(started.pid, signal.SIGKILL)
    assert not asyncio.run(started.ready())
    for _ in range(2):
        with pytest.raises(OSError, match="the process that forks workers failed"):
            started.fork(spec)


@pytest.mark.usefixtures("silent")
def test_one_that_hangs_is_given_up(
    spec: WorkerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote, "FORK_S", 0.1)
    started = Zygote(spec, tmp_path / "zygote.log")
    os.kill(started.pid, signal.SIGSTOP)
    with pytest.raises(OSError, match=r"no answer within 0\.1 s"):
        started.fork(spec)
    assert not psutil.pid_exists(started.pid)


def test_a_worker_that_the_launcher_does_not_know_of_does_not_run(
    spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gave up waiting, or died, after the fork."""
    unknown: list[int] = []

    def not_understood(text: bytes) -> int:
        unknown.append(int(text))
        raise ValueError("not understood")

    lonely = Zygote(spec, spec.log.with_name("lonely.log"))
    assert asyncio.run(asyncio.wait_for(lonely.ready(), 240))
    monkeypatch.setattr(zygote, "int", not_understood, raising=False)
    with pytest.raises(OSError, match="not understood"):
        lonely.fork(spec)
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in unknown], timeout=60)
    assert len(unknown) == 1
    assert alive == []
    assert not spec.log.exists()


def says_something(served: Served) -> bool:
    body = {"model": "solver", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    return httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).is_success


@pytest.mark.engine
def test_the_end_of_one_process_leaves_the_others_alone(
    two_cores: None, tmp_path: Path, children: Callable[[], set[psutil.Process]]
) -> None:
    with serve_in_thread(CLUSTER, log_dir=tmp_path, supervised=True) as served:
        [forking] = [child for child in children() if ".zygote" in child.cmdline()[-1]]
        before = served.pids
        assert says_something(served)

        back = served.kill("solver-0")
        back()
        assert served.pids["prefill-0"] == before["prefill-0"]
        assert says_something(served)
        assert forking.is_running()

        forking.kill()
        forking.wait(60)
        kept = served.pids
        time.sleep(0.5)
        assert says_something(served)
        assert served.pids == kept

        back = served.kill("solver-0")
        back()
        assert says_something(served)
        assert served.pids["prefill-0"] == before["prefill-0"]
