"""Gives KV leases back that nobody will read, so that their blocks are free at once."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from prefillshare_server.router.errors import RouterError, WorkerUnreachable, timed_out
from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.router.workers import Workers

logger = logging.getLogger(__name__)

_RELEASE_S = 5.0
_ATTEMPTS = 3
_CONNECT_S = 0.5
_LOOKS_S = (0.0, 0.05, 0.2)
"""Pauses before each look at a worker that may be dying: its port closes after its connections."""


class Leases:
    """Works in the background, since nobody waits for it. What fails is left to the lease's end."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, worker: WorkerEndpoint, request_id: str) -> None:
        """Tell prefill worker `worker` that nobody will read what call `request_id` brings.

        Also right while that call is running or before it arrives, and more than once.
        """
        self._start(self._release(worker, request_id))

    async def release_if_dead(
        self, reader: WorkerEndpoint, worker: WorkerEndpoint, request_id: str
    ) -> None:
        """Release as above if decode worker `reader` is dead, which may have taken the lease.

        Dead is what refuses connections. Any other worker may still be reading the blocks, and they
        must not get other content under its hands: its lease ends by itself.
        """
        looking = self._start(self._release_if_dead(reader, worker, request_id))
        await asyncio.shield(looking)

    async def close(self) -> None:
        """Wait for what is under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _release(self, worker: WorkerEndpoint, request_id: str) -> None:
        retrying = AsyncRetrying(
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.1),
            retry=retry_if_exception(_may_repeat),
            reraise=True,
        )
        try:
            await retrying(self._release_once, worker, request_id)
        except RouterError as error:
            if isinstance(error, WorkerUnreachable) and not error.sent:
                return  # A dead worker holds nothing.
            logger.warning("a lease on %s is left to end by itself: %s", worker.id, error)

    async def _release_once(self, worker: WorkerEndpoint, request_id: str) -> None:
        try:
            async with (
                asyncio.timeout(_RELEASE_S),
                self._workers.request(
                    "POST",
                    worker,
                    "/prefillshare/release",
                    phase="prefill",
                    body={"request_id": request_id},
                ),
            ):
                return
        except TimeoutError:
            raise timed_out("prefill", worker.id, _RELEASE_S) from None

    async def _release_if_dead(
        self, reader: WorkerEndpoint, worker: WorkerEndpoint, request_id: str
    ) -> None:
        for pause_s in _LOOKS_S:
            await asyncio.sleep(pause_s)
            if await _is_dead(reader):
                self.release(worker, request_id)
                return


async def _is_dead(worker: WorkerEndpoint) -> bool:
    address = urlsplit(worker.url)
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(address.hostname, address.port or 80)
    except ConnectionRefusedError:
        return True
    except OSError:  # TimeoutError is one: a host that does not answer may go on reading.
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return False


def _may_repeat(error: BaseException) -> bool:
    if isinstance(error, WorkerUnreachable):
        return error.sent
    return isinstance(error, RouterError) and error.status >= 500
