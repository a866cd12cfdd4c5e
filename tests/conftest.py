"""Fixtures of the whole suite: nothing may outlive the test that started it."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SETTLE_S = 15


def _ours() -> set[str]:
    """Processes, listening ports and shared-memory segments that belong to this test run."""
    me = psutil.Process()
    found = {f"shm:{path.name}" for path in Path("/dev/shm").iterdir()}
    for process in [me, *me.children(recursive=True)]:
        try:
            if process.pid != me.pid and process.status() != psutil.STATUS_ZOMBIE:
                found.add(f"process:{process.pid} {' '.join(process.cmdline())[:120]}")
            found |= {
                f"port:{connection.laddr.port} of process {process.pid}"
                for connection in process.net_connections(kind="tcp")
                if connection.status == psutil.CONN_LISTEN
            }
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every test ends with the processes, ports and shared memory it began with.

    Fixtures of a wider scope are set up before this one, so a shared cluster counts as present.
    """
    before = _ours()
    yield
    deadline = time.monotonic() + SETTLE_S
    while (left := _ours() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"the test left behind: {sorted(left)}"
