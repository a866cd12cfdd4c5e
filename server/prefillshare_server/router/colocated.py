"""Engines that prefill and decode in one: no handoff moves anything (`mode: colocated`).

Takes the place of prefill.py. The engine computes what it lacks of the prompt's base KV when the
answer is asked for, so what it found in its prefix cache is known at the end only.
"""

import uuid
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prefillshare_server.router.admission import Admission
from prefillshare_server.router.ask import Ask, salted
from prefillshare_server.router.errors import RouterError, WorkerRefused, worker_failed
from prefillshare_server.router.handoff import Computed, Handoff, Prompt, Reader
from prefillshare_server.router.health import Health
from prefillshare_server.router.identity import Identity
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.placement import Affinity, Placed, Placement
from prefillshare_server.router.prefill_calls import cached_tokens, no_prefill_worker
from prefillshare_server.router.sessions import Session, Sessions
from prefillshare_server.router.topology import Decoder, WorkerEndpoint
from prefillshare_server.router.workers import Workers
from prefillshare_server.vllm_plugin.account import PARAMS_KEY


class Colocated:
    """Keeps sessions pinned to the engines that admission chose."""

    def __init__(
        self,
        workers: Workers,
        health: Health,
        placement: Placement,
        admission: Admission,
        sessions: Sessions,
        metrics: Metrics,
        *,
        timeout_s: float,
    ) -> None:
        self._workers = workers
        self._health = health
        self._placement = placement
        self._admission = admission
        self._sessions = sessions
        self._metrics = metrics
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def handoffs(
        self, ask: Ask, session: Session | None, readers: Sequence[Reader]
    ) -> AsyncIterator[list[Handoff]]:
        """One for every reader, in their order, on the engine where it has room.

        Of several engines, for want of room, the first reader's is the session's.
        """
        affinity = self._bound(session, readers[0].worker.id)
        yield [_handoff(reader, affinity) for reader in readers]

    async def again(
        self, ask: Ask, session: Session | None, reader: Reader, *, avoid: Collection[str] = ()
    ) -> Handoff:
        """Another one for a reader that moved, to resume its answer."""
        return _handoff(reader, self._bound(session, reader.worker.id))

    def reserve(self, session: Session) -> Placed:
        """Pin the session to the engine on which a prefill ahead will run, if it has room then.

        Raises NoWorker.
        """
        home = session.prefill_worker
        placed = self._placement.place_prefill(home, sessionless=False)
        if placed is None:
            raise no_prefill_worker(self._placement, self._health, home, 0)
        self._bound(session, placed.worker.id)
        return placed

    async def ahead(
        self, session: Session, ids: Sequence[int], *, cache_salt: Any, at: WorkerEndpoint
    ) -> Computed:
        """Have an engine compute the whole KV blocks of `ids` with the base's weights.

        Admission chooses it, likely `at`. For the engine it is a call of one token to the base.
        It keeps blocks before the last prompt token only, so one token follows them, whichever.
        """
        first = self._placement.prefill[0]
        block = self._health.facts[first.id].block_size or 1
        whole = len(ids) // block * block
        if not whole:
            return Computed(self._engine(session) or first, 0, 0)
        wanted = [*ids[:whole], ids[0]]
        async with self._admission.admitted(
            _base_call(first), session, [Prompt(ids=wanted, context_tokens=whole)]
        ) as [reader]:
            engine = reader.worker
            self._bound(session, engine.id)
            try:
                answer = await self._workers.json(
                    "POST",
                    engine,
                    "/v1/completions",
                    phase="colocated",
                    timeout_s=self._timeout_s,
                    body={
                        "model": engine.model,
                        "prompt": wanted,
                        "max_tokens": 1,
                        "temperature": 0,
                        **salted(cache_salt),
                    },
                    request_id=uuid.uuid4().hex,
                )
            except RouterError as error:
                self._health.failed(engine, error)
                if isinstance(error, WorkerRefused) and error.status >= 500:
                    raise worker_failed(error, engine.id, "colocated") from error
                raise
            self._health.succeeded(engine)
        cached = cached_tokens(answer)
        return Computed(engine, cached, len(wanted) - cached)

    def _engine(self, session: Session) -> WorkerEndpoint | None:
        pinned = [w for w in self._placement.prefill if w.id == session.prefill_worker]
        return pinned[0] if pinned else None

    def give_back(self, handoff: Handoff) -> None:
        """Nothing is leased."""

    def in_hand(self, worker_id: str) -> int:
        """Prefills beside those of the answers that admission counts: none."""
        return 0

    async def close(self) -> None:
        """Nothing is under way."""

    def _bound(self, session: Session | None, engine: str) -> Affinity:
        """Pin the session to the engine."""
        if session is None:
            return "none"
        before = session.prefill_worker
        if before == engine:
            return "hit"
        if before is not None:
            self._metrics.rebound("no_room_or_unreachable")
        self._sessions.bind(session, engine)
        return "new" if before is None else "rebound"


def _base_call(engine: WorkerEndpoint) -> Ask:
    """A call of one token to the base itself, for admission."""
    return Ask(
        kind="completions",
        body={"max_tokens": 1},
        role=engine.model,
        decoder=Decoder(engine.pool or "", engine.model),
        who=Identity(None, None, False),
        n=1,
        stream=False,
        include_usage=False,
        return_token_ids=False,
        request_id="",
    )


def _handoff(reader: Reader, affinity: Affinity) -> Handoff:
    placed = Placed(reader.worker, affinity)
    return Handoff(reader, placed, params={PARAMS_KEY: {}}, cached_tokens=None)
