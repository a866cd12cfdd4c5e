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
"""Restarts in a row after which a worker that does not come back to stay is given up."""

STABLE_S = 10.0
"""A worker that served for so long is back: its next restart is the first of a row again."""

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

        Whatever `start_again` raises is a failed restart of that worker.
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
        restarts = 0
        while True:
            reason, served_s = await self._until_down(name, http)
            spec = self._workers[name].spec
            self._on_event(name, "died", f"{reason}; log: {spec.log}")
            if served_s >= STABLE_S:
                restarts = 0
            if restarts >= ATTEMPTS:
                in_vain = f"in {restarts} restarts in a row it never served for {STABLE_S:g} s"
                raise WorkerFailedError(spec, f"{reason}; {in_vain}")
            restarts = await self._restart(name, restarts)

    async def _until_down(self, name: str, http: aiohttp.ClientSession) -> tuple[str, float]:
        """Wait until the worker ended or does not serve any more; says why, and how long it did."""
        worker = self._workers[name]
        loop = asyncio.get_running_loop()
        ready = answered = loop.time()
        failed, next_probe = 0, ready + PROBE_EVERY_S
        while worker.running:
            await asyncio.sleep(_POLL_S)
            if loop.time() < next_probe:
                continue
            if await _healthy(worker, http):
                failed, answered = 0, loop.time()
            else:
                failed += 1
            if failed >= FAILED_PROBES and worker.running:
                reason = f"it runs, but did not answer {failed} health checks in a row"
                return reason, answered - ready
            next_probe = loop.time() + PROBE_EVERY_S
        return worker.failure().reason, (answered if failed else loop.time()) - ready

    async def _restart(self, name: str, restarts: int) -> int:
        """Restart it until it is ready; returns `restarts`, those of this row so far, and its."""
        while True:
            restarts += 1
            try:
                await self._replace(name, min(FIRST_DELAY_S * 2 ** (restarts - 1), LONGEST_DELAY_S))
            except WorkerFailedError as error:
                again = f"restart {restarts} of {ATTEMPTS}"
                self._on_event(name, "failed", f"{again}: {error.reason}; log: {error.log}")
                if restarts >= ATTEMPTS:
                    raise
            else:
                return restarts

    async def _replace(self, name: str, delay_s: float) -> None:
        try:
            # Its ports must be free, and nothing of it may answer for the new one. What is left
            # of it serves nobody and need not end in peace.
            await self._workers[name].stop(STOP_STARTING_TIMEOUT_S)
            await _pause(delay_s)
            await self._start_again(name)
        except WorkerFailedError:
            raise
        except Exception as error:
            # Such as a disk that is full now and perhaps not later.
            reason = f"{type(error).__name__}: {error}"
            raise WorkerFailedError(self._workers[name].spec, reason) from error


async def _pause(longest_s: float) -> None:
    """Workers that died together do not start in step."""
    await asyncio.sleep(longest_s * random.uniform(0.5, 1))


async def _healthy(worker: WorkerProcess, http: aiohttp.ClientSession) -> bool:
    timeout = aiohttp.ClientTimeout(total=PROBE_ANSWER_S)
    try:
        async with http.get(f"{worker.spec.endpoint.url}/health", timeout=timeout) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
