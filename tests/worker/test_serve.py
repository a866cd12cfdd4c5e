"""`prefillshare serve` from start to end, as a process of its own."""

import re
import signal
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
from tests.worker.driver import START_TIMEOUT_S

pytestmark = pytest.mark.engine

CLI = "from prefillshare_server.cli import main; main()"


class Served:
    """A running `prefillshare serve`; its output so far is in `output`."""

    def __init__(self, folder: Path, prefix: Sequence[str]) -> None:
        (self.port,) = free_ports(1)
        file = folder / "cluster.yaml"
        router = CLUSTER.router.model_copy(update={"port": self.port})
        file.write_text(CLUSTER.model_copy(update={"router": router}).to_yaml())
        self._log = folder / "output"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-c", CLI, "serve", str(file)], stdout=log, stderr=log
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


@contextmanager
def serving(folder: Path, prefix: Sequence[str] = ()) -> Iterator[Served]:
    served = Served(folder, prefix)
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
        assert served.process.wait(timeout=30) == 0
        assert not psutil.wait_procs(workers, timeout=5)[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_or_a_closed_terminal_during_the_start_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    with serving(tmp_path) as served:
        served.wait_for("loading the model")
        workers = served.workers()
        served.process.send_signal(number)
        assert served.process.wait(timeout=30) == 0
        assert served.output.endswith("stopped\n")
        assert len(workers) >= 2
        assert not psutil.wait_procs(workers, timeout=5)[1]


def test_a_worker_that_dies_ends_serve_and_is_named(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.wait_for(f"http://127.0.0.1:{served.port}")
        workers = served.workers()
        engines = [each for each in workers if "EngineCore" in each.name()]
        engines[0].kill()
        assert served.process.wait(timeout=60) == 1
        reason = (
            r"error: worker (prefill|solver)-0 failed: its engine process was killed.+\n +log: /"
        )
        assert re.search(reason, served.output)
        assert not psutil.wait_procs(workers, timeout=5)[1]
