"""Which workers take calls: a circuit breaker for each, and a probe that closes it again."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from prefillshare_server.router.errors import (
    RouterError,
    WorkerRefused,
    WorkerUnreachable,
    timed_out,
    unknown_worker,
)
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.router.workers import Workers

logger = logging.getLogger(__name__)

State = Literal["up", "open", "draining"]
"""Takes calls; is passed over because it failed; finishes what it has and gets nothing new."""

FAILURES = 3
"""Calls, or probes, in vain in a row that open a circuit. A broken connection does at once."""

_PROBE_S = 5.0
_CHECK_S = 10.0
"""Between looks at a worker that is up: it may have been restarted, or its clock may have moved."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker says of itself. Zeros and None where it has not said so yet."""

    engine_id: str | None
    """Fresh with every start of the worker."""
    block_size: int
    """Tokens per KV block."""
    num_blocks: int
    """KV blocks, with the one vLLM keeps for itself."""


@dataclass(slots=True, eq=False)
class _Circuit:
    worker: WorkerEndpoint
    failures: int = 0
    """Calls in a row."""
    missed: int = 0
    """Probes in a row. Counted apart: a worker may be well and still fail every call."""
    why_open: str | None = None
    """None while it is closed."""
    draining: bool = False
    probes: int = 0
    """In vain, or between two failures: a worker that keeps failing is asked less often."""
    opened: asyncio.Event = field(default_factory=asyncio.Event)


class Health:
    """Judges workers by their calls and probes those that failed. Entered, it probes.

    Client errors never count against a worker. Everything but the probes is synchronous: what
    `available` said holds until the next await.
    """

    def __init__(
        self,
        workers: Workers,
        endpoints: Sequence[WorkerEndpoint],
        metrics: Metrics,
        *,
        clock_skew_s: float,
        backoff_s: tuple[float, float] = (0.2, 5.0),
        clock: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._workers = workers
        self._metrics = metrics
        self._clock_skew_s = clock_skew_s
        self._backoff_s = backoff_s
        """The first and the longest pause before a probe."""
        self._clock = clock
        self._jitter = jitter
        self._circuits = {worker.id: _Circuit(worker) for worker in endpoints}
        self._facts = {
            worker.id: Facts(None, worker.block_size, worker.num_blocks) for worker in endpoints
        }
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._watching: list[asyncio.Task[None]] = []
        for worker in endpoints:
            metrics.worker_up(worker.id, True)

    async def __aenter__(self) -> Self:
        self._watching = [
            asyncio.create_task(self._watch(circuit)) for circuit in self._circuits.values()
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._watching = []

    @property
    def facts(self) -> Mapping[str, Facts]:
        """By worker id; replaced when a worker was restarted."""
        return self._facts

    def state(self, worker_id: str) -> State:
        """Raises RouterError(404) for a worker that does not exist."""
        circuit = self._circuit(worker_id)
        if circuit.draining:
            return "draining"
        return "up" if circuit.why_open is None else "open"

    def available(self, worker_id: str) -> bool:
        """Whether new calls may go to this worker."""
        return self.state(worker_id) == "up"

    def failing(self, worker_id: str) -> bool:
        """Whether the worker failed and has not answered a probe since, also if it is draining."""
        return self._circuit(worker_id).why_open is not None

    def why_not(self, worker_id: str) -> str | None:
        """What keeps new calls from this worker; None if nothing does."""
        circuit = self._circuit(worker_id)
        return "draining" if circuit.draining else circuit.why_open

    def failed(self, worker: WorkerEndpoint, error: RouterError) -> None:
        """A call to `worker` ended with `error`. What its client got wrong does not count."""
        circuit = self._circuit(worker.id)
        if _is_workers_fault(error):
            circuit.failures += 1
            self._judge(circuit, circuit.failures, error)

    def succeeded(self, worker: WorkerEndpoint) -> None:
        """A call to `worker` ended well. Closes nothing: it may have begun before the failures."""
        circuit = self._circuit(worker.id)
        if circuit.why_open is None:
            circuit.failures = circuit.probes = 0

    def drain(self, worker_id: str) -> None:
        """Give this worker nothing new. Raises RouterError(404) if there is none of this id."""
        self._set_draining(worker_id, True)

    def undrain(self, worker_id: str) -> None:
        """End `drain`. Raises RouterError(404) if there is no worker of this id."""
        self._set_draining(worker_id, False)

    def listen(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever a worker's state or facts changed."""
        self._listeners.append(on_change)

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next change of a worker's state or facts, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _circuit(self, worker_id: str) -> _Circuit:
        if worker_id not in self._circuits:
            raise unknown_worker(worker_id, self._circuits)
        return self._circuits[worker_id]

    def _set_draining(self, worker_id: str, draining: bool) -> None:
        circuit = self._circuit(worker_id)
        if circuit.draining != draining:
            circuit.draining = draining
            self._tell()

    def _judge(self, circuit: _Circuit, in_a_row: int, error: RouterError) -> None:
        if isinstance(error, WorkerUnreachable):
            self._open(circuit, f"could not be reached: {error.reason}")
        elif in_a_row >= FAILURES:
            self._open(circuit, f"failed {in_a_row} times in a row: {error.message}")

    def _open(self, circuit: _Circuit, why: str) -> None:
        was_closed = circuit.why_open is None
        circuit.why_open = why
        if was_closed:
            logger.warning("worker %s gets no calls: %s", circuit.worker.id, why)
            self._metrics.worker_up(circuit.worker.id, False)
            self._metrics.circuit_opened(circuit.worker.id)
            circuit.opened.set()
            self._tell()

    def _close(self, circuit: _Circuit) -> None:
        logger.info("worker %s gets calls again", circuit.worker.id)
        circuit.why_open = None
        circuit.failures = 0
        circuit.opened.clear()
        self._metrics.worker_up(circuit.worker.id, True)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for on_change in self._listeners:
            on_change()

    async def _watch(self, circuit: _Circuit) -> None:
        while True:
            await self._probe(circuit)
            if circuit.why_open is None:
                try:
                    async with asyncio.timeout(_CHECK_S):
                        await circuit.opened.wait()
                except TimeoutError:
                    circuit.probes = 0
                    continue
            first, longest = self._backoff_s
            pause = min(longest, first * 2.0 ** min(circuit.probes, 16))
            circuit.probes += 1
            # Half of it is left to chance, lest workers that failed together be asked together.
            await asyncio.sleep(pause * (1 + self._jitter()) / 2)

    async def _probe(self, circuit: _Circuit) -> None:
        """Ask the worker how it is: closes its circuit, or opens it."""
        worker = circuit.worker
        was_open = circuit.why_open is not None
        try:
            await self._require_health(worker)
            asked_at = self._clock()
            info = await self._info(worker)
            answered_at = self._clock()
        except RouterError as error:
            if _is_workers_fault(error):
                circuit.missed += 1
                self._judge(circuit, circuit.missed, error)
            return
        circuit.missed = 0
        skew = _skew(info.get("now"), asked_at, answered_at)
        if abs(skew) > self._clock_skew_s:
            self._open(
                circuit,
                f"its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the "
                f"router's and kv.clock_skew_s allows {self._clock_skew_s:g} s; set the clocks",
            )
            return
        self._note(worker, info)
        if was_open:  # A failure during the probe is news that it may have missed.
            self._close(circuit)

    async def _require_health(self, worker: WorkerEndpoint) -> None:
        try:
            async with (
                asyncio.timeout(_PROBE_S),
                self._workers.request("GET", worker, "/health", phase=worker.phase),
            ):
                return
        except TimeoutError:
            raise timed_out(worker.phase, worker.id, _PROBE_S) from None

    async def _info(self, worker: WorkerEndpoint) -> Mapping[str, object]:
        try:
            info = await self._workers.json(
                "GET", worker, "/prefillshare/info", phase=worker.phase, timeout_s=_PROBE_S
            )
        except WorkerRefused as error:
            if error.status >= 500:
                raise
            return {}
        return info if isinstance(info, dict) else {}

    def _note(self, worker: WorkerEndpoint, info: Mapping[str, object]) -> None:
        """Keep what a worker said; what it did not say stays."""
        before = self._facts[worker.id]
        engine_id = info.get("engine_id")
        now = Facts(
            engine_id=engine_id if isinstance(engine_id, str) else before.engine_id,
            block_size=_count(info.get("block_size"), before.block_size),
            num_blocks=_count(info.get("num_blocks"), before.num_blocks),
        )
        if now == before:
            return
        self._facts[worker.id] = now
        if before.engine_id not in (None, now.engine_id):
            logger.warning(
                "worker %s was restarted: engine %s, %d KV blocks (before: engine %s, %d)",
                *(worker.id, now.engine_id, now.num_blocks, before.engine_id, before.num_blocks),
            )
        self._tell()


def _is_workers_fault(error: RouterError) -> bool:
    """A 4xx never is, also where the router passes it on as a 502 of its own."""
    cause = error.__cause__
    refused = cause if isinstance(cause, WorkerRefused) else error
    return refused.status >= 500


def _skew(now: object, asked_at: float, answered_at: float) -> float:
    """Seconds a clock is surely ahead, if it said `now` between the two times of this one."""
    if not isinstance(now, int | float):
        return 0.0
    return max(now - answered_at, 0.0) or min(now - asked_at, 0.0)


def _count(value: object, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default
