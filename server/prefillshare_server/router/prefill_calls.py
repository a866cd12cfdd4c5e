"""Calls to prefill workers: where to, how often, and what they mean for a worker's health."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from prefillshare_server.router.errors import (
    NoWorker,
    RouterError,
    WorkerRefused,
    WorkerSilent,
    worker_failed,
)
from prefillshare_server.router.health import Health
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.placement import Placed, Placement
from prefillshare_server.router.sessions import Session, Sessions
from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.router.workers import Workers

T = TypeVar("T")

ATTEMPTS = 3
"""Worker calls per prompt. A prefill changes nothing, so it can be repeated."""

_CLIENT_ERRORS = frozenset({400, 413, 422})
"""Of a prefill worker: it judges the same prompt as the decode worker would."""


class PrefillCalls:
    """Sends token ids to prefill workers and keeps sessions pinned to them."""

    def __init__(
        self,
        workers: Workers,
        health: Health,
        placement: Placement,
        sessions: Sessions,
        metrics: Metrics,
        *,
        timeout_s: float,
        queue_s: float,
    ) -> None:
        self._workers = workers
        self._health = health
        self._placement = placement
        self._sessions = sessions
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._queue_s = queue_s
        self.running: list[WorkerEndpoint] = []
        """Where a prefill runs now, once for each."""

    async def repeated(
        self,
        attempt: Callable[[Placed], Awaitable[T]],
        session: Session | None,
        pool: str | None,
        pin: str | None = None,
        avoid: Collection[str] = (),
    ) -> T:
        """Attempt until it succeeds, on other workers of `pool` where possible, but not for ever.

        `pin` counts where the session has none. A worker's client errors and silence end it at
        once: the same would follow, or a worker that is only slow would get still more to do.
        """
        deadline = asyncio.get_running_loop().time() + self._queue_s
        tried: list[str] = []
        try:
            async for again in AsyncRetrying(
                stop=stop_after_attempt(ATTEMPTS),
                wait=wait_random_exponential(multiplier=0.1),
                retry=retry_if_exception(_may_repeat),
                reraise=True,
            ):
                with again:
                    placed = await self._placed(session, pool, pin, [*avoid, *tried], deadline)
                    if tried:
                        self._metrics.retried("prefill")
                    tried.append(placed.worker.id)
                    return await attempt(placed)
        except WorkerRefused as error:
            if error.status in _CLIENT_ERRORS:
                raise
            raise worker_failed(error, tried[-1], "prefill") from error
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def judged(self, worker: WorkerEndpoint) -> Iterator[None]:
        """Count the block as a prefill that runs on `worker`, and its end for its health."""
        self.running.append(worker)
        try:
            yield
        except RouterError as error:
            self._health.failed(worker, error)
            raise
        finally:
            self.running.remove(worker)
        self._health.succeeded(worker)

    async def send(
        self,
        worker: WorkerEndpoint,
        session: Session | None,
        ids: Sequence[int],
        *,
        known: int,
        request_id: str,
        fields: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """The worker's answer to one prefill of `ids`, of which it computed `known` before."""
        body = {
            "model": worker.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "stream": False,
            **fields,
        }
        if session is not None and worker.pool not in session.pins:
            session.placing[worker.pool] = worker.id
        try:
            with (
                self._placement.prefill_load(worker, self._uncached(worker, ids, known)),
                self._metrics.prefill_duration(worker.id),
            ):
                answer: Mapping[str, Any] = await self._workers.json(
                    "POST",
                    worker,
                    "/v1/completions",
                    phase="prefill",
                    timeout_s=self._timeout_s,
                    body=body,
                    request_id=request_id,
                )
                return answer
        finally:
            if session is not None:
                session.placing.pop(worker.pool, None)

    def bind(self, session: Session, worker: WorkerEndpoint) -> None:
        """Pin the session to the worker."""
        before = session.pins.get(worker.pool)
        if before not in (None, worker.id):
            self._metrics.rebound(self._why_left(before))
        self._sessions.bind(session, worker.id, worker.pool)

    def home(self, session: Session | None, pool: str | None, pin: str | None = None) -> str | None:
        """The worker where a prefill of the session belongs; `pin` where it has none yet."""
        if session is None:
            return pin
        return session.pins.get(pool) or session.placing.get(pool) or pin

    def block(self, worker: WorkerEndpoint) -> int:
        """Tokens of a KV block; 1 while it is not known."""
        return self._health.facts[worker.id].block_size or 1

    def _uncached(self, worker: WorkerEndpoint, ids: Sequence[int], known: int) -> int:
        """Tokens to compute: whole blocks are found, and the last token is computed anyway."""
        block = self.block(worker)
        return len(ids) - min(known, len(ids) - 1) // block * block

    async def _placed(
        self,
        session: Session | None,
        pool: str | None,
        pin: str | None,
        tried: Sequence[str],
        deadline: float,
    ) -> Placed:
        """A worker to prefill on, waiting for one to come back until `deadline` (loop time)."""
        while True:
            # Another call of the session may have pinned it meanwhile.
            home = self.home(session, pool, pin)
            placed = self._placement.place_prefill(
                home, sessionless=session is None, tried=tried, pool=pool
            )
            if placed is not None:
                return placed
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise no_prefill_worker(self._placement, self._health, home, self._queue_s, pool)
            await self._health.changed(left)

    def _why_left(self, worker_id: str) -> str:
        state = self._health.state(worker_id)
        if state == "draining":
            return "draining"
        return "worker_unreachable" if state == "open" else "worker_failed"


def _may_repeat(error: BaseException) -> bool:
    return (
        isinstance(error, RouterError)
        and error.status >= 500
        and not isinstance(error, NoWorker | WorkerSilent)
    )


def no_prefill_worker(
    placement: Placement,
    health: Health,
    pin: str | None,
    waited_s: float,
    pool: str | None = None,
) -> NoWorker:
    """The error where none of `pool` was available for so long, for a session with this pin."""
    why = {worker.id: health.why_not(worker.id) for worker in placement.prefill_workers(pool)}
    missing = {worker_id: reason for worker_id, reason in why.items() if reason is not None}
    what = "no prefill worker was"
    if len(missing) < len(why):
        what = f"prefill worker {pin}, to which router.affinity: hard ties the session, was not"
    return NoWorker(what, waited_s, missing)


def cached_tokens(answer: Mapping[str, Any]) -> int:
    """Prompt tokens that vLLM found in its prefix cache, by the usage in its answer."""
    usage = answer.get("usage") or {}
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
