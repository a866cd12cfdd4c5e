"""Servers for measurements: each a process family of its own, started from nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from prefillshare_server.config import Cluster
from prefillshare_server.launch.ports import free_ports

START_S = 600
STOP_S = 60
PREFILLSHARE = (sys.executable, "-c", "from prefillshare_server.cli import main; main()")


@contextmanager
def serving(cluster: Cluster, file: Path) -> Iterator[tuple[str, int, float]]:
    """`prefillshare serve`; yields its URL, its process id and the seconds until it answered.

    Writes the cluster to `file` and the log beside it. Any free port is taken.
    """
    [port] = free_ports(1)
    file.write_text(cluster.to_yaml())
    # Merges adapters, where it comes to that: once, long before the cluster is started.
    subprocess.run([*PREFILLSHARE, "check", file], check=True, capture_output=True)
    command = [*PREFILLSHARE, "serve", str(file), "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with started(command, {}, url, file.with_suffix(".log")) as (pid, ready_s):
        yield url, pid, ready_s


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], url: str, log: Path
) -> Iterator[tuple[int, float]]:
    """Run a server; yields its process id and the seconds until `url` was healthy.

    Nothing of it is left at the end.
    """
    started = time.monotonic()
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while not _answers(f"{url}/health"):
            if server.poll() is not None or time.monotonic() > started + START_S:
                said = "".join(log.read_text().splitlines(keepends=True)[-20:])
                raise RuntimeError(f"{command[2]} does not start:\n{said}")
            time.sleep(0.2)
        yield server.pid, time.monotonic() - started
    finally:
        processes = family(server.pid) if server.poll() is None else []
        server.terminate()
        _, alive = psutil.wait_procs(processes, STOP_S)
        for process in alive:
            process.kill()
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def family(pid: int) -> list[psutil.Process]:
    """A process and all it started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
