"""Which worker a call goes to, and what each worker has in hand."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from prefillshare_server.router.topology import WorkerEndpoint

Affinity = Literal["new", "hit", "rebound", "none"]
"""First call of a session; stayed on its prefill worker; had to leave it; no session."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The choice of a prefill worker."""

    worker: WorkerEndpoint
    affinity: Affinity


@dataclass(frozen=True, slots=True, eq=False)
class Reserved:
    """Room on a decode worker for one answer: its prompt and all it may generate."""

    worker: WorkerEndpoint
    blocks: int
    """KV blocks."""
    model: str
    """What answers there, by its name at the worker."""
    engine: str | None = None
    """The worker's start that it is room on, if the worker had said which."""


class Placement:
    """Knows the workers and their loads, and chooses prefill workers."""

    def __init__(
        self,
        workers: Sequence[WorkerEndpoint],
        pinned: Mapping[str, int],
        *,
        available: Callable[[str], bool],
        affinity: Literal["soft", "hard"],
    ) -> None:
        self.prefill = [worker for worker in workers if worker.phase != "decode"]
        self._prefill_of: dict[str, list[WorkerEndpoint]] = {}
        """By role, where each has prefill workers of its own."""
        for worker in workers:
            if worker.phase == "prefill" and worker.pool is not None:
                self._prefill_of.setdefault(worker.pool, []).append(worker)
        self.decode: dict[str, list[WorkerEndpoint]] = {}
        """By pool."""
        for worker in workers:
            if worker.phase != "prefill" and worker.pool is not None:
                self.decode.setdefault(worker.pool, []).append(worker)
        self.prefilling: Counter[str] = Counter()
        """Prompt tokens each prefill worker has in hand and not in its cache, as far as known."""
        self._given: Counter[str] = Counter()
        """The same of all that each has ever had in hand."""
        self._pinned = pinned
        self._available = available
        """Whether new calls may go to a worker, by its id."""
        self._hard = affinity == "hard"

    def prefill_pool(self, role: str) -> str | None:
        """Whose prefill workers the calls of `role` go to: its own, or None for everybody's."""
        return role if self._prefill_of else None

    def prefill_workers(self, pool: str | None) -> Sequence[WorkerEndpoint]:
        """Those of a role; None for all."""
        return self.prefill if pool is None else self._prefill_of.get(pool, [])

    def place_prefill(
        self,
        pin: str | None,
        *,
        sessionless: bool,
        tried: Collection[str] = (),
        pool: str | None = None,
    ) -> Placed | None:
        """The pinned worker; for a call without a pin the one of `pool` with the least to prefill.

        Among equals the one with the fewest sessions, then the one that has had the least to do, so
        that calls which come one at a time use every worker's cache.
        A soft pin gives way to workers not `tried` while its worker is not available or was tried.
        None if no worker is available: for a hard pin, not the pinned one.
        """
        ready = [w for w in self.prefill_workers(pool) if self._available(w.id)]
        if self._hard and pin is not None and not sessionless:
            candidates = [worker for worker in ready if worker.id == pin]
        else:
            candidates = [worker for worker in ready if worker.id not in tried] or ready
        if not candidates:
            return None
        worker = min(
            candidates,
            key=lambda w: (
                w.id != pin,
                self.prefilling[w.id],
                self._pinned.get(w.id, 0),
                self._given[w.id],
            ),
        )
        if sessionless:
            return Placed(worker, "none")
        if pin is None:
            return Placed(worker, "new")
        return Placed(worker, "hit" if worker.id == pin else "rebound")

    @contextmanager
    def prefill_load(self, worker: WorkerEndpoint, tokens: int) -> Iterator[None]:
        """Count `tokens` as in hand on `worker` for as long as the block runs."""
        self.prefilling[worker.id] += tokens
        self._given[worker.id] += tokens
        try:
            yield
        finally:
            self.prefilling[worker.id] -= tokens
