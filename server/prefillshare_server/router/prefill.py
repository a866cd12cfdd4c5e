"""Prefill: the base computes the KV of a prompt and leases it for one reader."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from prefillshare_server.router.ask import Ask
from prefillshare_server.router.errors import (
    RouterError,
    WorkerRefused,
    WorkerUnreachable,
    bad_request,
    crowded,
    handoff_missing,
)
from prefillshare_server.router.fanout import together
from prefillshare_server.router.handoff import Computed, Handoff, Reader
from prefillshare_server.router.health import Health
from prefillshare_server.router.leases import Leases
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.placement import Placed, Placement
from prefillshare_server.router.prefill_calls import (
    PrefillCalls,
    cached_tokens,
    no_prefill_worker,
    salted,
)
from prefillshare_server.router.sessions import Session, Sessions
from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.router.workers import Workers
from prefillshare_server.vllm_plugin.handoff import ReadableParams

_LEASED = {"do_remote_decode": True, "do_remote_prefill": False}


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
        self._health = health
        self._placement = placement
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._calls = PrefillCalls(
            workers,
            health,
            placement,
            sessions,
            metrics,
            timeout_s=timeout_s,
            queue_s=queue_s,
        )
        self._leases = Leases(workers)
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

    def reserve(self, session: Session) -> Placed:
        """Pin the session to the worker on which a prefill ahead will run. Raises NoWorker."""
        home = session.prefill_worker or session.placing
        placed = self._placement.place_prefill(home, sessionless=False)
        if placed is None:
            raise no_prefill_worker(self._placement, self._health, home, 0)
        self._calls.bind(session, placed.worker.id)
        return placed

    async def ahead(
        self, session: Session, ids: Sequence[int], *, known: int, cache_salt: Any
    ) -> Computed:
        """Compute the whole KV blocks of `ids`, which no reader waits for, so nothing is leased.

        What does not fill a block is left to the call that follows: it would be computed again
        then. `known` of the ids were prefilled before, as far as the session knows.
        """

        async def attempt(placed: Placed) -> Computed:
            worker = placed.worker
            whole = len(ids) // self._block(worker) * self._block(worker)
            # vLLM computes at least the last token's block. One token more finds all blocks.
            wanted = ids[: whole + (known >= whole)] if whole else ()
            cached = 0
            if wanted:
                with self._calls.judged(worker):
                    answer = await self._calls.send(
                        worker,
                        session,
                        wanted,
                        uncached=max(len(wanted) - known, 0),
                        request_id=uuid.uuid4().hex,
                        fields=salted(cache_salt),
                    )
                cached = cached_tokens(answer)
            self._calls.bind(session, worker.id)
            return Computed(worker, cached, len(wanted) - cached)

        return await self._calls.repeated(attempt, session)

    def _block(self, worker: WorkerEndpoint) -> int:
        return self._health.facts[worker.id].block_size or 1

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
        attempt = partial(self._attempt, ask, session, reader)
        return await self._calls.repeated(attempt, session, pin, avoid)

    async def _attempt(
        self, ask: Ask, session: Session | None, reader: Reader, placed: Placed
    ) -> Handoff:
        """One prefill call. Whatever ends it early, no lease is left behind that it might have."""
        request_id = uuid.uuid4().hex
        worker, prompt = placed.worker, reader.prompt
        known = session is not None and session.prefill_worker == worker.id and not ask.isolated
        try:
            with self._calls.judged(worker):
                answer = await self._calls.send(
                    worker,
                    session,
                    prompt.ids,
                    uncached=len(prompt.ids) - (prompt.kept_tokens if known else 0),
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
            self._calls.bind(session, placed.worker.id)
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
