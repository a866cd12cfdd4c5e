"""Prefill: the base computes the KV of a prompt and leases it for one reader."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prefillshare_server.router.ask import Ask
from prefillshare_server.router.errors import (
    RouterError,
    WorkerRefused,
    WorkerUnreachable,
    bad_request,
    handoff_missing,
    timed_out,
    worker_failed,
)
from prefillshare_server.router.fanout import together
from prefillshare_server.router.handoff import Handoff, Reader
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.placement import Placed, Placement
from prefillshare_server.router.sessions import Session, Sessions
from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.router.workers import Workers

_CLIENT_ERRORS = frozenset({400, 413, 422})
"""Of a prefill worker: it judges the same prompt as the decode worker would."""


class Prefill:
    """Runs prompts on prefill workers and keeps sessions pinned to them."""

    def __init__(
        self,
        workers: Workers,
        placement: Placement,
        sessions: Sessions,
        metrics: Metrics,
        *,
        timeout_s: float,
        release: Callable[[Handoff], None],
    ) -> None:
        self._workers = workers
        self._placement = placement
        self._sessions = sessions
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._release = release
        """Gives a lease back that no decode worker took."""
        self.grace_s = 1.0
        """How long a prefill goes on after its client left; see `_abandon`."""
        self._abandoned: set[asyncio.Task[None]] = set()
        self._several = asyncio.Lock()
        """Held by the call that takes several leases before it decodes. Two such calls could each
        hold the KV blocks that the other waits for."""

    @asynccontextmanager
    async def handoffs(
        self, ask: Ask, session: Session | None, readers: Sequence[Reader]
    ) -> AsyncIterator[list[Handoff]]:
        """Prefill for every reader; leases that nobody took by the end of the block are released.

        The first prefill runs alone: it pins the session and fills the prefix cache, so that the
        others compute only what does not fill a KV block. Raises RouterError(400) for a call whose
        prompts do not fit the prefill worker together.
        """
        made: list[Handoff] = []

        async def make(reader: Reader, pin: str | None) -> None:
            made.append(await self._handoff(ask, session, reader, pin))

        async def make_all() -> None:
            await make(readers[0], (session.prefill_worker or session.placing) if session else None)
            await together(make(reader, made[0].placed.worker.id) for reader in readers[1:])

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
            for handoff in made:
                if not handoff.taken:
                    self._release(handoff)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._several.acquire()
        except TimeoutError:
            raise timed_out("prefill", "pool", self._timeout_s) from None
        try:
            yield
        finally:
            self._several.release()

    def _require_room(self, readers: Sequence[Reader]) -> None:
        """Each prompt takes its blocks, each further choice for it only a last one of its own."""
        for worker in self._placement.prefill:
            if not worker.num_blocks or not worker.block_size:
                continue
            needed = sum(
                1 if reader.choice else -(-len(reader.prompt.ids) // worker.block_size)
                for reader in readers
            )
            # vLLM keeps one block for itself.
            if needed > worker.num_blocks - 1:
                raise bad_request(
                    f"the prompts and choices of this call take {needed} KV blocks at once, the "
                    f"prefill worker has {worker.num_blocks - 1}; send fewer prompts per call, or "
                    "a smaller n",
                    "n" if len({id(reader.prompt) for reader in readers}) == 1 else "prompt",
                )

    async def close(self) -> None:
        """Wait for abandoned prefills."""
        await asyncio.gather(*self._abandoned)

    async def _handoff(
        self, ask: Ask, session: Session | None, reader: Reader, pin: str | None
    ) -> Handoff:
        placed = self._placement.place_prefill(pin, sessionless=session is None)
        assert placed is not None, "a cluster has at least one prefill worker"
        try:
            answer = await self._answer(placed, ask, session, reader)
        except WorkerUnreachable:
            self._placement.unreachable(placed.worker)
            again = self._placement.place_prefill(
                pin, sessionless=session is None, tried=placed.worker.id
            )
            if again is None:
                raise
            placed = again
            self._metrics.retried("prefill")
            answer = await self._answer(placed, ask, session, reader)
        return self._accepted(answer, session, reader, placed)

    async def _answer(
        self, placed: Placed, ask: Ask, session: Session | None, reader: Reader
    ) -> Mapping[str, Any]:
        running = asyncio.create_task(self._run(placed.worker, ask, session, reader))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            task = asyncio.create_task(self._abandon(running, reader, placed))
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)
            raise

    async def _abandon(
        self, running: asyncio.Task[Mapping[str, Any]], reader: Reader, placed: Placed
    ) -> None:
        """End a prefill whose client has left, and give back the lease it may have been granted.

        Aborted at once, it could be granted unseen: the worker finishes while its answer is under
        way, and the blocks would stay leased for minutes. So it gets a moment to answer. Only a
        longer prefill is aborted, where that is unlikely and worth the saved work.
        """
        try:
            async with asyncio.timeout(self.grace_s):
                answer = await running
            self._release(self._accepted(answer, None, reader, placed))
        except (RouterError, TimeoutError):
            return

    async def _run(
        self, worker: WorkerEndpoint, ask: Ask, session: Session | None, reader: Reader
    ) -> Mapping[str, Any]:
        """One prefill call; the worker's answer."""
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
                    request_id=reader.request_id,
                )
                return answer
        except WorkerRefused as error:
            if error.status in _CLIENT_ERRORS:
                raise
            raise worker_failed(error, worker.id, "prefill") from error
        finally:
            if session is not None:
                session.placing = None

    def _accepted(
        self, answer: Mapping[str, Any], session: Session | None, reader: Reader, placed: Placed
    ) -> Handoff:
        """The handoff in a prefill worker's answer; pins the session.

        Raises RouterError(502) if there is none: a decode worker must never get the prompt without
        its KV.
        """
        params = answer.get("kv_transfer_params") or {}
        if not any(params.get("remote_block_ids") or ()):
            self._metrics.handoff_failed("kv_handoff_missing")
            raise handoff_missing(placed.worker.id)
        if session is not None:
            self._sessions.bind(session, placed.worker.id)
        cached = int(params.get("remote_prefill_cached_tokens") or 0)
        handoff = Handoff(reader, placed, params, cached)
        self._metrics.prefilled(handoff)
        return handoff
