"""Workers that die are started again while the others go on serving."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn

import aiohttp

from prefillshare_server.launch.process import (
    STOP_STARTING_TIMEOUT_S,
    OnEvent,
    WorkerFailedError,
    WorkerProcess,
)

ATTEMPTS = 5
"""Restarts in a row after which a worker that does not become ready is given up."""

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0

PROBE_EVERY_S = 5.0
PROBE_ANSWER_S = 5.0
FAILED_PROBES = 12
"""So many in a row end a worker that runs and does not serve. vLLM ends itself within seconds when
its engine died, and an API process may be busy for some."""

_POLL_S = 0.1


class Supervisor:
    """Watches each worker in a task of its own."""

    def __init__(
        self,
        workers: Mapping[str, WorkerProcess],
        start_again: Callable[[str], Awaitable[None]],
        on_event: OnEvent,
    ) -> None:
        """`workers` is live. `start_again` replaces one there and returns when it is ready.

        `start_again` raises WorkerFailedError.
        """
        self._workers = workers
        self._start_again = start_again
        self._on_event = on_event

    async def run(self) -> NoReturn:
        """Watch and restart until cancelled. Raises WorkerFailedError for a worker given up."""
        try:
            async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
                for name in self._workers:
                    group.create_task(self._keep(name, http))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        raise AssertionError("a cluster has workers, and their tasks do not end")

    async def _keep(self, name: str, http: aiohttp.ClientSession) -> NoReturn:
        while True:
            reason = await self._until_down(name, http)
            self._on_event(name, "died", f"{reason}; log: {self._workers[name].spec.log}")
            await self._restart(name)

    async def _until_down(self, name: str, http: aiohttp.ClientSession) -> str:
        """Wait until the worker ended or does not serve any more; says why."""
        worker = self._workers[name]
        loop = asyncio.get_running_loop()
        failed, next_probe = 0, loop.time() + PROBE_EVERY_S
        while worker.running:
            await asyncio.sleep(_POLL_S)
            if loop.time() < next_probe:
                continue
            failed = 0 if await _healthy(worker, http) else failed + 1
            if failed >= FAILED_PROBES and worker.running:
                return f"it runs, but did not answer {failed} health checks in a row"
            next_probe = loop.time() + PROBE_EVERY_S
        return worker.failure().reason

    async def _restart(self, name: str) -> None:
        delay_s = FIRST_DELAY_S
        attempt = 1
        while True:
            # Its ports must be free, and nothing of it may answer for the new one. What is left
            # of it serves nobody and need not end in peace.
            await self._workers[name].stop(STOP_STARTING_TIMEOUT_S)
            await asyncio.sleep(min(delay_s, LONGEST_DELAY_S) * random.uniform(0.5, 1))
            try:
                return await self._start_again(name)
            except WorkerFailedError as error:
                again = f"restart {attempt} of {ATTEMPTS}"
                self._on_event(name, "failed", f"{again}: {error.reason}; log: {error.log}")
                if attempt == ATTEMPTS:
                    raise
            attempt += 1
            delay_s *= 2


async def _healthy(worker: WorkerProcess, http: aiohttp.ClientSession) -> bool:
    timeout = aiohttp.ClientTimeout(total=PROBE_ANSWER_S)
    try:
        async with http.get(f"{worker.spec.endpoint.url}/health", timeout=timeout) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
