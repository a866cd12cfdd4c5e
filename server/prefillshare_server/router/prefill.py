"""Prefill: the base computes the KV of a prompt and leases it for one reader."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from prefillshare_server.router.ask import Ask
from prefillshare_server.router.errors import (
    NoWorker,
    RouterError,
    WorkerRefused,
    WorkerSilent,
    WorkerUnreachable,
    bad_request,
    crowded,
    handoff_missing,
    worker_failed,
)
from prefillshare_server.router.fanout import together
from prefillshare_server.router.handoff import Handoff, Reader
from prefillshare_server.router.health import Health
from prefillshare_server.router.leases import Leases
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.placement import Placed, Placement
from prefillshare_server.router.sessions import Session, Sessions
from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.router.workers import Workers
from prefillshare_server.vllm_plugin.handoff import ReadableParams

ATTEMPTS = 3
"""Worker calls per prompt. A prefill changes nothing, so it can be repeated."""

_CLIENT_ERRORS = frozenset({400, 413, 422})
"""Of a prefill worker: it judges the same prompt as the decode worker would."""


class Prefill:
    """Runs prompts on prefill workers and keeps sessions pinned to them."""

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
        self._leases = Leases(workers)
        self._running: list[WorkerEndpoint] = []
        """Where a prefill runs now, once for each."""
        self._made: dict[Reader, list[Handoff]] = {}
        """All handoffs of the readers that are inside `handoffs`."""
        self._several = asyncio.Lock()
        """Held by the call that takes several leases before it decodes. Two such calls could each
        hold the KV blocks that the other waits for."""

    @asynccontextmanager
    async def handoffs(
        self, ask: Ask, session: Session | None, readers: Sequence[Reader]
    ) -> AsyncIterator[list[Handoff]]:
        """Prefill for every reader; leases that are open at the end of the block are given back.

        The first prefill runs alone: it pins the session and fills the prefix cache, so that the
        others compute only what does not fill a KV block. Raises RouterError(400) for a call whose
        prompts do not fit the prefill worker together.
        """
        made: list[Handoff] = []

        async def make(reader: Reader, pin: str | None) -> None:
            made.append(await self._handoff(ask, session, reader, pin))

        async def make_all() -> None:
            await make(readers[0], None)
            await together(make(reader, made[0].placed.worker.id) for reader in readers[1:])

        self._made.update((reader, []) for reader in readers)
        try:
            if len(readers) == 1:
                await make_all()
            else:
                self._require_room(readers)
                async with self._alone():
                    await make_all()
            made.sort(key=lambda handoff: handoff.reader.index)
            with self._metrics.pending_handoffs(len(made)):
                yield made
        finally:
            for reader in readers:
                for handoff in self._made.pop(reader):
                    self.give_back(handoff)

    async def again(
        self, ask: Ask, session: Session | None, reader: Reader, *, avoid: Collection[str] = ()
    ) -> Handoff:
        """Another handoff of the prompt for a reader inside `handoffs`, to resume its answer.

        Prefill workers in `avoid` are taken only if no other is available.
        """
        return await self._handoff(ask, session, reader, None, avoid)

    def give_back(self, handoff: Handoff) -> None:
        """See in the background that the lease ends, unless that is settled. Mutates `handoff`."""
        if handoff.over:
            return
        handoff.over = True
        worker = handoff.placed.worker
        if handoff.taken:
            self._leases.release_unless_read(handoff.worker, worker, handoff.request_id)
        else:
            self._leases.release(worker, handoff.request_id)

    def in_hand(self, worker_id: str) -> int:
        """Prefills that run on this worker now, and handoffs of it that calls may still read."""
        made = (handoff for handoffs in self._made.values() for handoff in handoffs)
        workers = [*self._running, *(handoff.placed.worker for handoff in made)]
        return sum(worker.id == worker_id for worker in workers)

    async def close(self) -> None:
        """Wait for releases under way."""
        await self._leases.close()

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._several.acquire()
        except TimeoutError:
            raise crowded(self._timeout_s) from None
        try:
            yield
        finally:
            self._several.release()

    def _require_room(self, readers: Sequence[Reader]) -> None:
        """Each prompt takes its blocks, each further choice for it only a last one of its own."""
        for worker in self._placement.prefill:
            facts = self._health.facts[worker.id]
            if not facts.num_blocks or not facts.block_size:
                continue
            needed = sum(
                1 if reader.choice else -(-len(reader.prompt.ids) // facts.block_size)
                for reader in readers
            )
            # vLLM keeps one block for itself.
            if needed > facts.num_blocks - 1:
                raise bad_request(
                    f"the prompts and choices of this call take {needed} KV blocks at once, the "
                    f"prefill worker has {facts.num_blocks - 1}; send fewer prompts per call, or "
                    "a smaller n",
                    "n" if len({id(reader.prompt) for reader in readers}) == 1 else "prompt",
                )

    async def _handoff(
        self,
        ask: Ask,
        session: Session | None,
        reader: Reader,
        pin: str | None,
        avoid: Collection[str] = (),
    ) -> Handoff:
        """Prefill until it succeeds, on other workers where possible, but not for ever.

        `pin` counts where the session has none. A worker's client errors and silence end it at
        once: the same would follow, or a worker that is only slow would get still more to do.
        """
        deadline = asyncio.get_running_loop().time() + self._queue_s
        tried: list[str] = []
        try:
            async for attempt in AsyncRetrying(
                stop=stop_after_attempt(ATTEMPTS),
                wait=wait_random_exponential(multiplier=0.1),
                retry=retry_if_exception(_may_repeat),
                reraise=True,
            ):
                with attempt:
                    placed = await self._placed(session, pin, [*avoid, *tried], deadline)
                    if tried:
                        self._metrics.retried("prefill")
                    tried.append(placed.worker.id)
                    return await self._attempt(placed, ask, session, reader)
        except WorkerRefused as error:
            if error.status in _CLIENT_ERRORS:
                raise
            raise worker_failed(error, tried[-1], "prefill") from error
        raise AssertionError("the last attempt returns or raises")

    async def _placed(
        self, session: Session | None, pin: str | None, tried: Sequence[str], deadline: float
    ) -> Placed:
        """A worker to prefill on, waiting for one to come back until `deadline` (loop time)."""
        while True:
            home = pin
            if session is not None:
                # Another call of the session may have pinned it meanwhile.
                home = session.prefill_worker or session.placing or pin
            placed = self._placement.place_prefill(home, sessionless=session is None, tried=tried)
            if placed is not None:
                return placed
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise self._no_worker(home)
            await self._health.changed(left)

    def _no_worker(self, pin: str | None) -> NoWorker:
        why = {worker.id: self._health.why_not(worker.id) for worker in self._placement.prefill}
        missing = {worker_id: reason for worker_id, reason in why.items() if reason is not None}
        what = "no prefill worker was"
        if len(missing) < len(why):
            what = f"prefill worker {pin}, to which router.affinity: hard ties the session, was not"
        return NoWorker(what, self._queue_s, missing)

    async def _attempt(
        self, placed: Placed, ask: Ask, session: Session | None, reader: Reader
    ) -> Handoff:
        """One prefill call. Whatever ends it early, no lease is left behind that it might have."""
        request_id = uuid.uuid4().hex
        worker = placed.worker
        self._running.append(worker)
        try:
            answer = await self._run(worker, ask, session, reader, request_id)
            handoff = self._accepted(answer, session, reader, placed, request_id)
        except RouterError as error:
            self._health.failed(worker, error)
            if _may_have_a_lease(error):
                self._leases.release(worker, request_id)
            raise
        except BaseException:
            self._leases.release(worker, request_id)
            raise
        finally:
            self._running.remove(worker)
        self._health.succeeded(worker)
        return handoff

    async def _run(
        self,
        worker: WorkerEndpoint,
        ask: Ask,
        session: Session | None,
        reader: Reader,
        request_id: str,
    ) -> Mapping[str, Any]:
        """The worker's answer."""
        prompt = reader.prompt
        body: dict[str, Any] = {
            "model": worker.model,
            "prompt": prompt.ids,
            "max_tokens": 1,
            "temperature": 0,
            "stream": False,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        if ask.body.get("cache_salt") is not None:
            body["cache_salt"] = ask.body["cache_salt"]
        pinned_here = session is not None and session.prefill_worker == worker.id
        uncached = len(prompt.ids) - (prompt.kept_tokens if pinned_here else 0)
        if session is not None and session.prefill_worker is None:
            session.placing = worker.id
        try:
            with (
                self._placement.prefill_load(worker, uncached),
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
                session.placing = None

    def _accepted(
        self,
        answer: Mapping[str, Any],
        session: Session | None,
        reader: Reader,
        placed: Placed,
        request_id: str,
    ) -> Handoff:
        """The handoff in a prefill worker's answer; pins the session.

        Raises RouterError(502) if there is none that can be read: a decode worker must never get
        the prompt without its KV.
        """
        params = answer.get("kv_transfer_params") or {}
        readable = ReadableParams.of(params)
        if readable is None or not any(readable.remote_block_ids):
            self._metrics.handoff_failed("kv_handoff_missing")
            raise handoff_missing(placed.worker.id)
        if session is not None:
            self._bind(session, placed.worker.id)
        cached = int(params.get("remote_prefill_cached_tokens") or 0)
        handoff = Handoff(reader, placed, params, cached, request_id=request_id)
        self._made[reader].append(handoff)
        self._metrics.prefilled(handoff)
        return handoff

    def _bind(self, session: Session, worker_id: str) -> None:
        before = session.prefill_worker
        if before not in (None, worker_id):
            self._metrics.rebound(self._why_left(before))
        self._sessions.bind(session, worker_id)

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


def _may_have_a_lease(error: RouterError) -> bool:
    """Whether a call that ended so can have reached the worker's engine."""
    if isinstance(error, WorkerUnreachable):
        return error.sent
    return not (isinstance(error, WorkerRefused) and error.status < 500)
