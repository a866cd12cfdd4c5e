"""Gives KV leases back that nobody will read, so that their blocks are free at once."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from prefillshare_server.router.errors import (
    RouterError,
    WorkerSilent,
    WorkerUnreachable,
    timed_out,
)
from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.router.workers import Workers

logger = logging.getLogger(__name__)

_RELEASE_S = 5.0
_ATTEMPTS = 3
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

    def release_unless_read(
        self, reader: WorkerEndpoint, worker: WorkerEndpoint, request_id: str
    ) -> None:
        """Release as above unless decode worker `reader`, which was sent the call, may read it.

        One that has the call in its engine ends the lease itself. One that cannot be asked may
        still be reading the blocks, and they must not get other content under its hands: the lease
        ends by itself.
        """
        self._start(self._release_unless_read(reader, worker, request_id))

    async def close(self) -> None:
        """Wait for what is under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
            if isinstance(error, WorkerUnreachable) and error.refused:
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

    async def _release_unless_read(
        self, reader: WorkerEndpoint, worker: WorkerEndpoint, request_id: str
    ) -> None:
        for pause_s in _LOOKS_S:
            await asyncio.sleep(pause_s)
            try:
                reading = await self._reading(reader, request_id)
            except (WorkerUnreachable, WorkerSilent) as error:
                why: RouterError = error
                continue
            except RouterError as error:
                why = error
                break
            if not reading:
                self.release(worker, request_id)
            return
        logger.warning("a lease on %s is left to end by itself: %s", worker.id, why)

    async def _reading(self, reader: WorkerEndpoint, request_id: str) -> bool:
        """Whether the decode worker has the call; if not, it will not take it any more."""
        try:
            answer = await self._workers.json(
                "POST",
                reader,
                "/prefillshare/abandon",
                phase="decode",
                timeout_s=_RELEASE_S,
                body={"request_id": request_id},
            )
        except WorkerUnreachable as error:
            if not error.refused:
                raise
            return False  # It is dead.
        return not (isinstance(answer, dict) and answer.get("reading") is False)


def _may_repeat(error: BaseException) -> bool:
    if isinstance(error, WorkerUnreachable):
        return not error.refused
    return isinstance(error, RouterError) and error.status >= 500
