"""Which worker a call goes to, and what each worker has in hand."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from prefillshare_server.router.topology import WorkerEndpoint

Affinity = Literal["new", "hit", "rebound", "none"]
"""First call of a session; stayed on its prefill worker; had to leave it; no session."""

AVOID_S = 5.0
"""How long a worker that could not be reached is passed over."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The choice of a prefill worker."""

    worker: WorkerEndpoint
    affinity: Affinity


class Placement:
    """Chooses workers by load. Every count goes up and down in one `with` block."""

    def __init__(
        self,
        workers: Sequence[WorkerEndpoint],
        pinned: Mapping[str, int],
        *,
        affinity: Literal["soft", "hard"],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.prefill = [worker for worker in workers if worker.phase == "prefill"]
        self.decode: dict[str, list[WorkerEndpoint]] = {}
        for worker in workers:
            if worker.phase == "decode" and worker.role is not None:
                self.decode.setdefault(worker.role, []).append(worker)
        self.prefilling: Counter[str] = Counter()
        """Prompt tokens each prefill worker has in hand and not in its cache, as far as known."""
        self.decoding: Counter[str] = Counter()
        """Calls each decode worker has in hand."""
        self._pinned = pinned
        self._hard = affinity == "hard"
        self._clock = clock
        self._avoid_until: dict[str, float] = {}

    @property
    def roles(self) -> list[str]:
        """Roles with at least one decode worker."""
        return list(self.decode)

    def place_prefill(
        self, pin: str | None, *, sessionless: bool, tried: str | None = None
    ) -> Placed | None:
        """The pinned worker, or for a call without a pin the one with the least to prefill.

        A soft pin gives way while its worker was just found unreachable or is the one in `tried`.
        None if that leaves no worker.
        """
        others = [worker for worker in self.prefill if worker.id != tried]
        reachable = [worker for worker in others if not self._avoided(worker.id)]
        for worker in others if self._hard else reachable:
            if worker.id == pin:
                return Placed(worker, "none" if sessionless else "hit")
        # If all were unreachable a moment ago, one of them may be back.
        free = reachable or others
        if not free or (pin is not None and self._hard):
            return None
        worker = min(free, key=lambda w: (self.prefilling[w.id], self._pinned.get(w.id, 0)))
        if sessionless:
            return Placed(worker, "none")
        return Placed(worker, "new" if pin is None or pin == worker.id else "rebound")

    def place_decode(self, role: str, last: str | None) -> WorkerEndpoint:
        """The replica of `role` with the fewest calls; among equals the one used `last`.

        One that was just found unreachable has few calls as well, and is passed over.
        """
        replicas = self.decode[role]
        reachable = [worker for worker in replicas if not self._avoided(worker.id)]
        return min(reachable or replicas, key=lambda w: (self.decoding[w.id], w.id != last))

    def unreachable(self, worker: WorkerEndpoint) -> None:
        """Pass `worker` over for a while."""
        self._avoid_until[worker.id] = self._clock() + AVOID_S

    @contextmanager
    def prefill_load(self, worker: WorkerEndpoint, tokens: int) -> Iterator[None]:
        """Count `tokens` as in hand on `worker` for as long as the block runs."""
        self.prefilling[worker.id] += tokens
        try:
            yield
        finally:
            self.prefilling[worker.id] -= tokens

    @contextmanager
    def decode_load(self, worker: WorkerEndpoint) -> Iterator[None]:
        """Count a call as running on `worker` for as long as the block runs."""
        self.decoding[worker.id] += 1
        try:
            yield
        finally:
            self.decoding[worker.id] -= 1

    def _avoided(self, worker_id: str) -> bool:
        return self._avoid_until.get(worker_id, 0.0) > self._clock()
