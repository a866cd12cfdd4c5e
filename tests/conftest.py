"""Fixtures of the whole suite: nothing may outlive the test that started it.

`make test` runs the tests in several processes at once; `tests/groups.py` says which in which.
"""

import ctypes
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import psutil
import pytest

if TYPE_CHECKING:
    import openai

    from tests.served import Served

if "PYTEST_XDIST_WORKER" in os.environ:
    # The other processes use the other cores; threads that wait for each other would take them.
    os.environ["OMP_NUM_THREADS"] = "1"

# Machines are noisy.
hypothesis.settings.register_profile(
    "noisy",
    hypothesis.settings(),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("noisy")

SETTLE_S = 60

SHARED_MEMORY = Path("/dev/shm")


PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# A process whose parent ended becomes a child of this one, and so is seen as left behind.
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each process takes one group after another, in the order of the collection."""
    from xdist.scheduler import LoadScopeScheduling

    from tests.groups import group

    config.option.loadscopereorder = False
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = group
    return scheduler


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Several processes begin with the longest groups."""
    if hasattr(config, "workerinput"):
        from tests.groups import group, rank

        items.sort(key=lambda item: rank(group(item.nodeid)))


def _present() -> set[str]:
    """Processes and listening ports of this test run, and all shared memory of the machine."""
    me = psutil.Process()
    found = {f"shared memory {path.name}" for path in SHARED_MEMORY.iterdir()}
    sockets: set[tuple[str, int]] = set()
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, OSError):
            if process is not me and process.status() != psutil.STATUS_ZOMBIE:
                found.add(f"process {process.pid}: {' '.join(process.cmdline())[:120]}")
            for descriptor in os.scandir(f"/proc/{process.pid}/fd"):
                with suppress(FileNotFoundError):
                    name = os.readlink(descriptor.path)
                    if name.startswith("socket:"):
                        sockets.add((name, process.pid))
    listening = _listening() if sockets else {}
    return found | {
        f"port {listening[name]} of process {pid}" for name, pid in sockets if name in listening
    }


def _listening() -> dict[str, int]:
    """Ports that any process listens on, by the name of its descriptor.

    Read once for all processes: psutil would read every connection again for each of them.
    """
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines():
            if " 0A " in line:  # TCP_LISTEN
                _, local, _, _, _, _, _, _, _, inode, *_ = line.split()
                found[f"socket:[{inode}]"] = int(local.rpartition(":")[2], 16)
    return found


def _of_others() -> set[str]:
    """Shared memory that a program outside this test run has mapped, or has in its name."""
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
            named = re.match(r"sem\.loky-(\d+)-", path.name)
            if path.stat().st_ino in inodes or (named and int(named[1]) not in family):
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
        if any(each.startswith("shared memory") for each in left):
            left -= _of_others()
        if not left:
            return
        assert time.monotonic() < deadline, f"the test left behind: {sorted(left)}"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which the whole tiny family is built, apart from the user's own."""
    # Imported here, for the SDK's tests also run where only the SDK is installed.
    from prefillshare_server.models import store, tiny

    folder = tmp_path_factory.getbasetemp()
    # Of several processes one builds each model, and the others wait for it.
    home = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "home"
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
