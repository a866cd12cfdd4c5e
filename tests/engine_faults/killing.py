"""Workers that are killed, held or kept away, so that a test has the moment it is about."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from prefillshare_server.launch import supervisor
from tests.engine_faults.at_rest import assert_at_rest
from tests.served import Served
from tests.worker.driver import stopped


class Kill:
    """Kills workers of a supervised cluster."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._waits: list[Callable[[], None]] = []

    def __call__(self, worker_id: str) -> None:
        """SIGKILL to all processes of a worker."""
        self._waits.append(self._served.kill(worker_id))

    def settle(self) -> None:
        """Return when all that were killed are back, and nothing is in hand."""
        while self._waits:
            self._waits.pop()()
        assert_at_rest(self._served)


@contextmanager
def suspended(served: Served, worker_id: str) -> Iterator[None]:
    """Hold all processes of a worker, so that what it is sent stays under way."""
    with stopped(served.pids[worker_id]):
        yield


@contextmanager
def kept_away() -> Iterator[None]:
    """No worker that is killed inside the block is started again before its end."""
    over = threading.Event()

    async def wait(longest_s: float) -> None:
        while not over.is_set():
            await asyncio.sleep(0.05)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "_pause", wait)
        try:
            yield
        finally:
            over.set()
