"""Warm-ups: while one role answers, its prompt is prefilled for the role that comes next.

The optimistic baseline of the paper's appendix C.2: it hides prefills behind decoding where roles
share no KV, and computes what PrefillShare finds. It is no part of PrefillShare itself.
"""

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from typing import Any

from prefillshare_server.router.ask import Ask
from prefillshare_server.router.colocated import Colocated
from prefillshare_server.router.errors import RouterError
from prefillshare_server.router.handoff import Handoff
from prefillshare_server.router.ledger import cache
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.prefill import Prefill
from prefillshare_server.router.sessions import Session
from prefillshare_server.router.topology import WorkerEndpoint

logger = logging.getLogger(__name__)


class WarmUps:
    """Runs them in the background. No call waits for one: its own prefill finds, at the worker,
    every block that a warm-up before it computes, since an engine takes requests in their order."""

    def __init__(self, prefill: Prefill | Colocated, metrics: Metrics, *, most: int) -> None:
        """`most` is how many may run at once on each prefill worker; further ones are dropped."""
        self._prefill = prefill
        self._metrics = metrics
        self._most = most
        self._running: Counter[str] = Counter()
        """By worker."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, ask: Ask, session: Session | None, first: Handoff) -> None:
        """Prefill the context of the call's first prompt for `ask.next_role`, if it names one.

        A call without a session has no next one.
        """
        if ask.next_role in (None, ask.role) or session is None:
            return
        assert ask.next_role is not None, "None is left out above"
        assert isinstance(self._prefill, Prefill), "the cluster file allows no warm-ups elsewhere"
        worker = self._prefill.next_worker(session, ask.next_role)
        if worker is None or self._running[worker.id] >= self._most:
            self._metrics.warmed_up("dropped")
            return
        self._running[worker.id] += 1
        following = replace(ask, role=ask.next_role)
        task = asyncio.create_task(self._run(following, session, first, worker))
        self._tasks.add(task)

        def over(_: object) -> None:
            # Here, for a task that is cancelled before it begins runs no line of its own.
            self._tasks.discard(task)
            self._running[worker.id] -= 1

        task.add_done_callback(over)

    @property
    def running(self) -> int:
        """How many run now."""
        return self._running.total()

    async def close(self) -> None:
        """End what runs."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, ask: Ask, session: Session, first: Handoff, worker: WorkerEndpoint
    ) -> None:
        salt, ids = ask.cache_salt, first.reader.prompt.context_ids
        try:
            computed = await self._prefill.ahead(session, ids, cache_salt=salt, at=worker)
        except RouterError as error:
            logger.warning("a warm-up for role %r failed: %s", ask.role, error)
            self._metrics.warmed_up(error.code or "prefill_failed")
            return
        self._metrics.warmed_up("ok")
        self._metrics.prefilled(computed.worker.id, computed)
        session.totals.computed_tokens += computed.computed_tokens
        session.ledger.mark_cached(first.context_end, cache(computed.worker.id, salt))
