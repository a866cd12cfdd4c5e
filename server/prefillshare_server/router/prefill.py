"""Prefill: the base computes the KV of a prompt and leases it for one reader."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from prefillshare_server.router.ask import Ask, salted
from prefillshare_server.router.errors import (
    RouterError,
    WorkerRefused,
    WorkerUnreachable,
    bad_request,
    crowded,
    handoff_missing,
)
from prefillshare_server.router.fanout import together
from prefillshare_server.router.handoff import Computed, Handoff, Prompt, Reader
from prefillshare_server.router.health import Health
from prefillshare_server.router.leases import Leases
from prefillshare_server.router.ledger import cache
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.placement import Placed, Placement
from prefillshare_server.router.prefill_calls import (
    PrefillCalls,
    cached_tokens,
    no_prefill_worker,
)
from prefillshare_server.router.sessions import Session
from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.vllm_plugin.handoff import ReadableParams

_LEASED = {"do_remote_decode": True, "do_remote_prefill": False}


class Prefill:
    """Runs prompts on prefill workers and keeps sessions pinned to them."""

    def __init__(
        self,
        calls: PrefillCalls,
        leases: Leases,
        health: Health,
        placement: Placement,
        metrics: Metrics,
        *,
        timeout_s: float,
    ) -> None:
        self._calls = calls
        self._leases = leases
        self._health = health
        self._placement = placement
        self._metrics = metrics
        self._timeout_s = timeout_s
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
                self._require_room(ask, readers)
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

    def reserve(self, session: Session) -> Placed:
        """Pin the session to the worker on which a prefill ahead will run. Raises NoWorker."""
        home = self._calls.home(session, None)
        placed = self._placement.place_prefill(home, sessionless=False)
        if placed is None:
            raise no_prefill_worker(self._placement, self._health, home, 0)
        self._calls.bind(session, placed.worker)
        return placed

    def next_worker(self, session: Session, role: str) -> WorkerEndpoint | None:
        """Where a call of `role` would be prefilled now; None if no worker is available."""
        pool = self._placement.prefill_pool(role)
        home = self._calls.home(session, pool)
        placed = self._placement.place_prefill(home, sessionless=False, pool=pool)
        return placed.worker if placed else None

    async def ahead(
        self, session: Session, ids: Sequence[int], *, cache_salt: Any, at: WorkerEndpoint
    ) -> Computed:
        """Compute the whole KV blocks of `ids`, which no reader waits for, so nothing is leased.

        What does not fill a block is left to the call that follows: it would be computed again
        then. `at` is the worker, unless the session is pinned to another one of its pool by now.
        """

        async def attempt(placed: Placed) -> Computed:
            worker = placed.worker
            known = session.ledger.cached(ids, cache(worker.id, cache_salt))
            whole = len(ids) // self._calls.block(worker) * self._calls.block(worker)
            # vLLM computes at least the last token's block. One token more finds all blocks.
            wanted = ids[: whole + (known >= whole)] if whole else ()
            cached = 0
            if wanted:
                with self._calls.judged(worker):
                    answer = await self._calls.send(
                        worker,
                        session,
                        wanted,
                        known=known,
                        request_id=uuid.uuid4().hex,
                        fields=salted(cache_salt),
                    )
                cached = cached_tokens(answer)
            self._calls.bind(session, worker)
            return Computed(worker, cached, len(wanted) - cached)

        return await self._calls.repeated(attempt, session, at.pool, at.id)

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
        workers = [*self._calls.running, *(handoff.placed.worker for handoff in made)]
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

    def _require_room(self, ask: Ask, readers: Sequence[Reader]) -> None:
        """Each prompt takes its blocks, each further choice for it only a last one of its own."""
        for worker in self._placement.prefill_workers(self._placement.prefill_pool(ask.role)):
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
        attempt = partial(self._attempt, ask, session, reader)
        pool = self._placement.prefill_pool(ask.role)
        return await self._calls.repeated(attempt, session, pool, pin, avoid)

    async def _attempt(
        self, ask: Ask, session: Session | None, reader: Reader, placed: Placed
    ) -> Handoff:
        """One prefill call. Whatever ends it early, no lease is left behind that it might have."""
        request_id = uuid.uuid4().hex
        worker, prompt = placed.worker, reader.prompt
        try:
            with self._calls.judged(worker):
                answer = await self._calls.send(
                    worker,
                    session,
                    prompt.ids,
                    known=self._known(ask, session, prompt, worker),
                    request_id=request_id,
                    fields={"kv_transfer_params": _LEASED, **salted(ask.cache_salt)},
                )
                return self._accepted(answer, session, reader, placed, request_id)
        except RouterError as error:
            if _may_have_a_lease(error):
                self._leases.release(worker, request_id)
            raise
        except BaseException:
            self._leases.release(worker, request_id)
            raise

    def _known(
        self, ask: Ask, session: Session | None, prompt: Prompt, worker: WorkerEndpoint
    ) -> int:
        """Leading tokens of the prompt that the worker computed before, as far as is known here."""
        made = (handoff for handoffs in self._made.values() for handoff in handoffs)
        if any(h.reader.prompt is prompt and h.placed.worker.id == worker.id for h in made):
            return len(prompt.ids)  # For another choice, or before the answer broke off.
        if session is None:
            return 0
        return session.ledger.cached(prompt.ids, cache(worker.id, ask.cache_salt))

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
            self._calls.bind(session, placed.worker)
        cached = int(params.get("remote_prefill_cached_tokens") or 0)
        handoff = Handoff(reader, placed, params, cached, request_id=request_id)
        self._made[reader].append(handoff)
        self._metrics.prefilled(placed.worker.id, handoff)
        return handoff


def _may_have_a_lease(error: RouterError) -> bool:
    """Whether a call that ended so can have reached the worker's engine."""
    if isinstance(error, WorkerUnreachable):
        return error.sent
    return not (isinstance(error, WorkerRefused) and error.status < 500)
