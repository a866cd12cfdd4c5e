"""Servers for measurements: each a process family of its own, started from nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import httpx
import psutil

from prefillshare_server.config import Cluster
from prefillshare_server.launch.decoders import weights_directory
from prefillshare_server.launch.ports import free_ports
from prefillshare_server.launch.process import reason_in
from prefillshare_server.models import store

START_S = 900
STOP_S = 60
PREFILLSHARE = (sys.executable, "-c", "from prefillshare_server.cli import main; main()")
_POLL_S = 0.2
_TAIL_LINES = 30
# Of a worker's start, and of its restarts.
_READY = re.compile(
    r"^(?:[\d:]+ )?([\w.-]+?):? (?:is )?ready (?:again )?\((http://.+)\)$", re.MULTILINE
)


@contextmanager
def serving(cluster: Cluster, file: Path) -> Iterator[tuple[str, int, float]]:
    """`prefillshare serve`; yields its URL, its process id and the seconds until it answered.

    Writes the cluster to `file` and the log beside it. Any free port is taken. Raises RuntimeError
    with the end of the log when it does not start.
    """
    [port] = free_ports(1)
    file.write_text(cluster.to_yaml())
    # Takes long the first time, and is no part of a start.
    base_dir = store.resolve(cluster.base.model)
    for role in cluster.roles.values():
        if role.merge:
            weights_directory(role, base_dir)
    command = [*PREFILLSHARE, "serve", str(file), "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with started(command, {}, url, file.with_suffix(".log")) as (pid, ready_s):
        yield url, pid, ready_s


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], url: str, log: Path
) -> Iterator[tuple[int, float]]:
    """Run a server; yields its process id and the seconds until `url` was healthy.

    Nothing of it is left at the end. Raises RuntimeError with the end of its log when it does not
    start.
    """
    with spawned(command, environment, url, log) as server:
        server.wait_until_healthy()
        yield server.pid, time.monotonic() - server.began


@dataclass(frozen=True)
class Server:
    """A server that was begun."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        """Of the process that started all others."""
        return self.process.pid

    def wait_until_healthy(self) -> None:
        """Raises RuntimeError with the end of its log when it ends or takes more than START_S."""
        while not _answers(f"{self.url}/health"):
            if self.process.poll() is not None or time.monotonic() > self.began + START_S:
                said = self.log.read_text(errors="replace")
                end = "".join(said.splitlines(keepends=True)[-_TAIL_LINES:])
                reason = reason_in(said) or "it does not say why"
                raise RuntimeError(
                    f"{self.log.stem} does not start: {reason}; the end of {self.log}:\n{end}"
                )
            time.sleep(_POLL_S)


@contextmanager
def spawned(
    command: Sequence[str], environment: Mapping[str, str], url: str, log: Path
) -> Iterator[Server]:
    """Begin a server, without waiting for it. Nothing of it is left at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield Server(url, log, process)
    finally:
        processes = family(process.pid) if process.poll() is None else []
        process.terminate()
        _, alive = psutil.wait_procs(processes, STOP_S)
        for each in alive:
            each.kill()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends this program as Ctrl-C does: what it started is stopped before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def worker_urls(log: Path) -> dict[str, str]:
    """Where the workers of `prefillshare serve` listen, by id, as its log says."""
    return dict(_READY.findall(log.read_text()))


def family(pid: int) -> list[psutil.Process]:
    """A process and all it started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
