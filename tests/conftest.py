"""Fixtures of the whole suite: nothing may outlive the test that started it."""

import ctypes
import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    import openai

    from tests.served import Served

SETTLE_S = 15

SHARED_MEMORY = Path("/dev/shm")


PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# A process whose parent ended becomes a child of this one, and so is seen as left behind.
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _present() -> set[str]:
    """Processes and listening ports of this test run, and all shared memory of the machine."""
    me = psutil.Process()
    found = {f"shared memory {path.name}" for path in SHARED_MEMORY.iterdir()}
    family = [me, *me.children(recursive=True)]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            if process is not me and process.status() != psutil.STATUS_ZOMBIE:
                found.add(f"process {process.pid}: {' '.join(process.cmdline())[:120]}")
            found |= {
                f"port {connection.laddr.port} of process {process.pid}"
                for connection in process.net_connections(kind="tcp")
                if connection.status == psutil.CONN_LISTEN
            }
    return found


def _of_others() -> set[str]:
    """Shared memory that a program outside this test run has mapped."""
    me = psutil.Process()
    family = {process.pid for process in [me, *me.children(recursive=True)]}
    inodes: set[int] = set()
    for pid in set(psutil.pids()) - family:
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            inodes |= {int(inode) for inode in re.findall(r" (\d+) +/dev/shm/", maps)}
    found = set()
    for path in SHARED_MEMORY.iterdir():
        with suppress(FileNotFoundError):
            if path.stat().st_ino in inodes:
                found.add(f"shared memory {path.name}")
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every test ends with the processes, ports and shared memory it began with.

    Fixtures of a wider scope are set up before this one, so a shared cluster counts as present.
    """
    before = _present()
    yield
    deadline = time.monotonic() + SETTLE_S
    while left := _present() - before:
        if time.monotonic() > deadline:
            left -= _of_others()
            assert not left, f"the test left behind: {sorted(left)}"
            return
        time.sleep(0.1)


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which the whole tiny family is built, apart from the user's own."""
    # Imported here, for the SDK's tests also run where only the SDK is installed.
    from prefillshare_server.models import store, tiny

    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFILLSHARE_HOME", str(home))
        for name in tiny.FAMILY:
            store.build(name)
    return home


@pytest.fixture(scope="session")
def tiny_adapter(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of tiny-base whose weights are drawn: it changes every answer."""
    from tests.adapters import write_adapter

    base_dir = tiny_home / "models" / "tiny-base"
    return write_adapter(base_dir, tmp_path_factory.mktemp("tiny-adapter"))


@pytest.fixture
def client(served: "Served") -> "Iterator[openai.OpenAI]":
    """A plain openai client on the router of the cluster that the test's folder serves."""
    import openai

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="local", max_retries=0) as plain:
        yield plain


@pytest.fixture
def new_session() -> Callable[[], str]:
    """Fresh session ids, different in every test and run."""
    return lambda: f"test-session-{next(_NUMBERS)}"


_NUMBERS = itertools.count()
