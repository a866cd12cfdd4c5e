"""`prefillshare serve` from start to end, as a process of its own."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from prefillshare_server.launch.ports import free_ports
from tests.worker.conftest import CLUSTER
from tests.worker.driver import IDLE_S, START_TIMEOUT_S

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STOP_S = 120
"""Much more than a worker gets before it is killed."""

CLI = "from prefillshare_server.cli import main; main()"
IMPATIENT = """
import psutil
from prefillshare_server.launch import supervisor

answers = supervisor._healthy

async def healthy(worker, http):
    # A busy machine may keep any worker from answering in time, but only the test suspends one.
    return await answers(worker, http) or psutil.Process(worker.pid).status() != "stopped"

supervisor._healthy = healthy
supervisor.ATTEMPTS = 2
supervisor.PROBE_EVERY_S, supervisor.PROBE_ANSWER_S, supervisor.FAILED_PROBES = 1, 0.2, 4
"""
"""Put before `CLI`: as ever, in less time."""


@pytest.fixture(autouse=True)
def hangup_ends_a_process() -> Iterator[None]:
    """Under nohup it would not, and children inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


class Served:
    """A running `prefillshare serve`; its output so far is in `output`."""

    def __init__(self, folder: Path, prefix: Sequence[str], program: str) -> None:
        (self.port,) = free_ports(1)
        file = folder / "cluster.yaml"
        router = CLUSTER.router.model_copy(update={"port": self.port})
        file.write_text(CLUSTER.model_copy(update={"router": router}).to_yaml())
        self._log = folder / "output"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-c", program, "serve", str(file)],
                stdout=log,
                stderr=log,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while text not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def api(self, model: str) -> psutil.Process:
        """The API process of the worker that serves `model`."""
        children = psutil.Process(self.process.pid).children()
        [found] = [
            child for child in children if f"--served-model-name {model} " in _command(child)
        ]
        return found

    def complete(self) -> httpx.Response:
        return httpx.post(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json={"model": "solver", "prompt": [40] * 70, "max_tokens": 4, "ignore_eos": True},
            timeout=100,
        )


def _command(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


@contextmanager
def taken(port: int) -> Iterator[None]:
    """Listen where a worker did that was just killed."""
    deadline = time.monotonic() + IDLE_S
    while True:
        try:
            listener = socket.create_server(("127.0.0.1", port))
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with listener:
        yield


@contextmanager
def serving(folder: Path, prefix: Sequence[str] = (), program: str = CLI) -> Iterator[Served]:
    served = Served(folder, prefix, program)
    try:
        yield served
    finally:
        served.process.kill()
        served.process.wait()


def test_ctrl_c_while_serving_stops_everything(tmp_path: Path) -> None:
    with serving(tmp_path, prefix=["nohup"]) as served:
        served.wait_for(f"http://127.0.0.1:{served.port} ")
        # Ignored, as nohup has it; the call after it is answered.
        served.process.send_signal(signal.SIGHUP)
        answer = httpx.post(
            f"http://127.0.0.1:{served.port}/v1/chat/completions",
            json={"model": "solver", "messages": [{"role": "user", "content": "Hello"}]}
            | {"max_tokens": 4, "ignore_eos": True},
            timeout=60,
        )
        assert answer.json()["usage"]["completion_tokens"] == 4
        workers = served.workers()
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(timeout=STOP_S) == 0
        assert not psutil.wait_procs(workers, timeout=IDLE_S)[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_or_a_closed_terminal_during_the_start_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    with serving(tmp_path) as served:
        served.wait_for("loading the model")
        workers = served.workers()
        served.process.send_signal(number)
        assert served.process.wait(timeout=STOP_S) == 0
        assert served.output.endswith("stopped\n")
        assert len(workers) >= 2
        assert not psutil.wait_procs(workers, timeout=IDLE_S)[1]


def test_a_worker_that_dies_is_started_again_and_serves(tmp_path: Path) -> None:
    with serving(tmp_path, program=IMPATIENT + CLI) as served:
        served.wait_for(f"http://127.0.0.1:{served.port}")
        [engine] = served.api("solver").children()
        engine.kill()
        served.wait_for(" solver-0 is ready again")
        assert re.search(r"solver-0 died: its engine process was killed.+; log: /", served.output)
        assert served.complete().json()["usage"]["completion_tokens"] == 4

        # This one lives and does not answer.
        served.api("base").suspend()
        served.wait_for(" prefill-0 is ready again")
        assert "prefill-0 died: it runs, but did not answer 4 health checks" in served.output
        assert served.complete().json()["usage"]["completion_tokens"] == 4

        log = Path(re.findall(r"solver-0 died: .+; log: (.+)", served.output)[0])
        assert log.read_text().count("Application startup complete") == 2
        assert log.read_text().count("restart 1 of solver-0") == 1


def test_a_worker_that_cannot_come_back_ends_serve_and_is_named(tmp_path: Path) -> None:
    with serving(tmp_path, program=IMPATIENT + CLI) as served:
        served.wait_for(f"http://127.0.0.1:{served.port}")
        api = served.api("solver")
        port = int(re.findall(r"--port (\d+)", _command(api))[0])
        workers = served.workers()
        # Else the successor may be the first to listen there.
        served.process.send_signal(signal.SIGSTOP)
        api.kill()
        with taken(port):
            served.process.send_signal(signal.SIGCONT)
            assert served.process.wait(timeout=START_TIMEOUT_S) == 1
        assert "solver-0 died: it was killed by SIGKILL" in served.output
        assert "solver-0 did not come back, restart 1 of 2: " in served.output
        reason = r"error: worker solver-0 failed: .+Address already in use\n +log: /"
        assert re.search(reason, served.output)
        assert not psutil.wait_procs(workers, timeout=IDLE_S)[1]


def test_ctrl_c_during_a_restart_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.wait_for(f"http://127.0.0.1:{served.port}")
        served.api("base").kill()
        served.wait_for(" prefill-0 is started again")
        time.sleep(1)
        workers = served.workers()
        assert len(workers) >= 3
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(timeout=STOP_S) == 0
        assert not psutil.wait_procs(workers, timeout=IDLE_S)[1]
