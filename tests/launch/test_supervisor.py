"""When workers are started again, how soon, and when they are given up: with fake workers.

Time passes only where the supervisor sleeps.
"""

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from prefillshare_server.launch import supervisor
from prefillshare_server.launch.process import State, WorkerFailedError, WorkerProcess
from prefillshare_server.launch.supervisor import ATTEMPTS, STABLE_S, Supervisor
from tests.launch.stand_in import stand_in

FULL = OSError(errno.ENOSPC, "No space left on device")

AT_ONCE = 0.0
FOR_EVER = float("inf")


class Clock:
    """What the supervisor sees of asyncio's time."""

    def __init__(self) -> None:
        self._now = 0.0

    def time(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._now += seconds
        # A supervisor that goes on for ever must not keep the others from running.
        await asyncio.sleep(0)


class FakeWorker:
    """Runs for some time; listens nowhere."""

    def __init__(self, clock: Clock, life_s: float, stop_error: Exception | None = None) -> None:
        self.spec = stand_in(Path("logs/prefill-0.log"))
        self._clock, self._end = clock, clock.time() + life_s
        self._stop_error = stop_error

    @property
    def running(self) -> bool:
        return self._clock.time() < self._end

    def failure(self) -> WorkerFailedError:
        return WorkerFailedError(self.spec, "it ended")

    async def stop(self, timeout_s: float) -> None:
        if self._stop_error is not None:
            raise self._stop_error


class Case:
    """A supervisor of one fake worker that died, and what it does.

    `starts`: how long each restart's worker lives, or what the restart raises. The last repeats.
    `healthy`: whether the workers seem to answer health checks, which nobody does here.
    """

    def __init__(
        self,
        starts: Sequence[float | Exception],
        *,
        stop_error: Exception | None = None,
        healthy: bool = True,
    ) -> None:
        self._starts, self._healthy, self._clock = starts, healthy, Clock()
        self._workers = {"prefill-0": FakeWorker(self._clock, AT_ONCE, stop_error)}
        self.events: list[tuple[State, str]] = []
        self.delays: list[float] = []
        self.started = 0

    async def start_again(self, name: str) -> None:
        outcome = self._starts[min(self.started, len(self._starts) - 1)]
        self.started += 1
        if isinstance(outcome, Exception):
            raise outcome
        self._workers[name] = FakeWorker(self._clock, outcome)

    async def run(self) -> None:
        async def record(delay_s: float) -> None:
            self.delays.append(delay_s)
            await self._clock.sleep(delay_s)

        async def healthy(*_: object) -> bool:
            return True

        workers = cast(dict[str, WorkerProcess], self._workers)
        timed = {"sleep": self._clock.sleep, "get_running_loop": lambda: self._clock}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(supervisor, "asyncio", SimpleNamespace(**{**vars(asyncio), **timed}))
            patch.setattr(supervisor, "_pause", record)
            if self._healthy:
                patch.setattr(supervisor, "_healthy", healthy)
            async with asyncio.timeout(120):
                await Supervisor(
                    workers,
                    self.start_again,
                    lambda _, state, detail: self.events.append((state, detail)),
                ).run()

    async def given_up(self) -> WorkerFailedError:
        with pytest.raises(WorkerFailedError) as raised:
            await self.run()
        assert raised.value.worker == "prefill-0"
        return raised.value


async def test_a_worker_that_dies_whenever_it_is_ready_is_given_up() -> None:
    case = Case([AT_ONCE])
    error = await case.given_up()
    assert error.reason == "it ended; in 5 restarts in a row it never served for 10 s"
    assert case.started == ATTEMPTS


async def test_delays_grow_from_death_to_death() -> None:
    case = Case([AT_ONCE])
    await case.given_up()
    assert case.delays == [0.5, 1, 2, 4, 8]


async def test_failed_starts_and_early_deaths_count_together() -> None:
    case = Case([AT_ONCE, FULL])
    await case.given_up()
    assert case.delays == [0.5, 1, 2, 4, 8]


async def test_delays_end_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ATTEMPTS", 9)
    case = Case([AT_ONCE])
    await case.given_up()
    assert case.delays[-3:] == [30, 30, 30]


async def test_a_worker_that_served_for_a_while_starts_afresh() -> None:
    case = Case([AT_ONCE, AT_ONCE, 2 * STABLE_S, AT_ONCE])
    await case.given_up()
    assert case.delays == [0.5, 1, 2, 0.5, 1, 2, 4, 8]


async def test_a_worker_that_hangs_whenever_it_is_ready_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs for longer than STABLE_S, but does not serve."""
    monkeypatch.setattr(supervisor, "FAILED_PROBES", 3)
    monkeypatch.setattr(supervisor, "ATTEMPTS", 2)
    case = Case([FOR_EVER], healthy=False)
    error = await case.given_up()
    assert error.reason.startswith("it runs, but did not answer 3 health checks in a row; in 2 ")


async def test_a_restart_that_failed_on_a_full_disk_is_repeated() -> None:
    case = Case([FULL, FOR_EVER])
    running = asyncio.create_task(case.run())
    async with asyncio.timeout(120):
        while case.started < 2:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    [(_, died), (state, failed)] = case.events
    assert (died, state) == ("it ended; log: logs/prefill-0.log", "failed")
    assert failed.startswith("restart 1 of 5: OSError: [Errno 28] No space left on device; log: ")


async def test_a_disk_that_stays_full_ends_with_the_workers_name() -> None:
    case = Case([FULL])
    error = await case.given_up()
    assert error.reason == "OSError: [Errno 28] No space left on device"
    assert case.started == ATTEMPTS


async def test_a_worker_that_cannot_be_stopped_gets_no_successor_and_is_named() -> None:
    case = Case([FOR_EVER], stop_error=RuntimeError("outlives SIGKILL"))
    error = await case.given_up()
    assert error.reason == "RuntimeError: outlives SIGKILL"
    assert case.started == 0
