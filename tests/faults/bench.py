"""A router over the mock pair, in one event loop, and what must be zero when its calls are over."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from tokenizers import Tokenizer

from prefillshare_server.config import Cluster
from prefillshare_server.models.layout import Layout
from prefillshare_server.router.app import create_app
from prefillshare_server.router.parts import Router
from tests.faults.client import Leave, Outcome, request
from tests.mocks.mock_pair_decode import PairDecode
from tests.mocks.mock_pair_language import Vocabulary
from tests.mocks.mock_pair_ledger import PairCluster
from tests.mocks.mock_pair_prefill import PairPrefill
from tests.mocks.mock_pair_server import PairWorker

TIMEOUTS = {
    "queue_s": 30.0,
    "prefill_s": 6.0,
    "handoff_s": 4.0,
    "first_token_s": 8.0,
    "idle_stream_s": 5.0,
}
SETTLE_S = 20.0
"""What is still busy so long after the last call has leaked. Virtual seconds."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Which workers there are."""

    prefill: int = 1
    decode: tuple[str, ...] = ("alpha-0", "beta-0")
    """Ids; the role is the part in front of the hyphen."""
    prefill_blocks: int = 513
    decode_blocks: int = 257
    affinity: str = "soft"
    reserve_tokens: int = 64
    tight: bool = False
    """So few blocks that calls have to wait for them."""
    timeouts: Mapping[str, float] = field(default_factory=lambda: dict(TIMEOUTS))


@dataclass
class Bench:
    """A running router and the mock workers behind it."""

    app: Starlette
    router: Router
    cluster: PairCluster
    prefill: list[PairPrefill]
    decode: dict[str, PairDecode]
    layout: Layout

    @property
    def workers(self) -> list[PairWorker]:
        return [*self.prefill, *self.decode.values()]

    def worker(self, worker_id: str) -> PairWorker:
        return next(worker for worker in self.workers if worker.id == worker_id)

    async def call(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        session: str | None = None,
        leave: Leave | None = None,
    ) -> Outcome:
        """One generating request of a client."""
        headers = {} if session is None else {"X-Session-ID": session}
        return await request(self.app, "POST", path, body, headers=headers, leave=leave)

    async def drain(self, worker_id: str, *, on: bool) -> None:
        """Give a worker nothing new, or end that."""
        self.cluster.note(f"{worker_id} {'drains' if on else 'takes calls again'}")
        method = "POST" if on else "DELETE"
        outcome = await request(self.app, method, f"/v1/workers/{worker_id}/drain")
        assert outcome.status is not None
        assert outcome.status < 300, outcome.body

    async def leaks(self) -> list[str]:
        """Wait until nothing is busy; returns what still is after a while.

        Every lease must have been given back by then, and none by its end. Only those may be left
        whose release met broken connections: they are let expire.
        """
        deadline = asyncio.get_running_loop().time() + SETTLE_S
        while found := self._busy():
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.05)
        left = [(w, lease) for w in self.prefill for lease in w.engine.leases.values()]
        if left and all(lease.router_id in w.missed_releases for w, lease in left):
            self.cluster.note(f"{len(left)} leases are left to expire")
            self.cluster.clock.advance(self.cluster.lease_s + 1)
            found = self._busy()
        return found

    def gauges(self) -> list[str]:
        """Metrics that say that something is still going on."""
        metrics = self.router.metrics.render().decode().splitlines()
        names = ("kv_pending_handoffs", "queued_calls", "decode_reserved_blocks")
        lines = [
            line for line in metrics if line.startswith(tuple(f"prefillshare_{n}" for n in names))
        ]
        return [line for line in lines if float(line.rpartition(" ")[2])]

    def _busy(self) -> list[str]:
        router = self.router
        counts = {
            "calls in flight in sessions": router.sessions.in_flight,
            "tokens in prefill": router.placement.prefilling.total(),
            "answers in decode": router.admission.decoding.total(),
            "reserved blocks": router.admission.reserved.total(),
            "queued calls": router.admission.queued,
            "handoffs in hand": sum(router.prefill.in_hand(w.id) for w in self.prefill),
        }
        uneven = [f"{name}: {count}" for name, count in self._uneven().items()]
        left = [f"{name}: {count}" for name, count in counts.items() if count]
        return left + uneven + [leak for worker in self.workers for leak in worker.leaks()]

    def _uneven(self) -> dict[str, int]:
        admission = self.router.admission
        counters = {
            "prefilling": self.router.placement.prefilling,
            "decoding": admission.decoding,
            "reserved": admission.reserved,
        }
        return {
            f"{name} on {worker}": count
            for name, counter in counters.items()
            for worker, count in counter.items()
            if count
        }


@asynccontextmanager
async def running(base_dir: Path, shape: Shape, seed: int = 0) -> AsyncIterator[Bench]:
    """Start mock workers and a router over them; nothing may run any more when the block ends."""
    before = asyncio.all_tasks()
    chance = random.Random(seed)
    random.seed(seed)  # The router's jitter.
    cluster = PairCluster(vocabulary(base_dir), chance, handoff_s=shape.timeouts["handoff_s"])
    prefill = [
        PairPrefill(cluster, f"prefill-{number}", shape.prefill_blocks)
        for number in range(shape.prefill)
    ]
    decode = {
        name: PairDecode(cluster, name, shape.decode_blocks, role=name.partition("-")[0])
        for name in shape.decode
    }
    roles = {worker.role: {"model": "unused"} for worker in decode.values()}
    settings = Cluster.model_validate(
        {
            "base": {"model": "unused"},
            "roles": roles,
            "router": {"affinity": shape.affinity},
            "kv": {"lease_s": cluster.lease_s, "reserve_tokens": shape.reserve_tokens},
            "timeouts": dict(shape.timeouts),
        }
    )
    workers = [*prefill, *decode.values()]
    for worker in workers:
        await worker.start()
    try:
        with _noted(cluster):
            app = create_app(settings, [worker.endpoint for worker in workers], base_dir)
            async with app.router.lifespan_context(app):
                router: Router = app.state.router
                router.decode.patience_s_per_token = 0.01
                yield Bench(app, router, cluster, prefill, decode, layout(base_dir))
    finally:
        for worker in workers:
            await worker.close()
    # Transports say that they are closed one step later.
    for _ in range(3):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before
    assert not left, f"tasks left behind: {left}"


class _Notes(logging.Handler):
    def __init__(self, cluster: PairCluster) -> None:
        super().__init__(logging.INFO)
        self._cluster = cluster

    def emit(self, record: logging.LogRecord) -> None:
        cause = f" {record.exc_info[1]!r}" if record.exc_info else ""
        self._cluster.note(f"router: {record.getMessage()}{cause}")


@contextmanager
def _noted(cluster: PairCluster) -> Iterator[None]:
    """The router's log goes into the cluster's own, where it is in order with all else."""
    logger = logging.getLogger("prefillshare_server")
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(notes := _Notes(cluster))
    try:
        yield
    finally:
        logger.removeHandler(notes)
        logger.level, logger.propagate = before


@lru_cache(maxsize=2)
def vocabulary(base_dir: Path) -> Vocabulary:
    """The mock language model's words, in the tokens of the base."""
    return Vocabulary(Tokenizer.from_file(str(base_dir / "tokenizer.json")))


@lru_cache(maxsize=2)
def layout(base_dir: Path) -> Layout:
    """How the base writes prompts, for comparison with what the router sent."""
    from prefillshare_server.config import LayoutSettings

    return Layout.for_model(base_dir, LayoutSettings())
