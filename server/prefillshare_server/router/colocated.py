"""Engines that prefill and decode in one: no handoff moves anything (`mode: colocated`).

Takes the place of prefill.py. The engine computes what it lacks of the prompt's base KV when the
answer is asked for, so what it found in its prefix cache is known at the end only.
"""

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

from prefillshare_server.router.ask import Ask
from prefillshare_server.router.handoff import Handoff, Reader
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.placement import Affinity, Placed
from prefillshare_server.router.sessions import Session, Sessions
from prefillshare_server.vllm_plugin.account import PARAMS_KEY


class Colocated:
    """Keeps sessions pinned to the engines that admission chose."""

    def __init__(self, sessions: Sessions, metrics: Metrics) -> None:
        self._sessions = sessions
        self._metrics = metrics

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


def _handoff(reader: Reader, affinity: Affinity) -> Handoff:
    placed = Placed(reader.worker, affinity)
    return Handoff(reader, placed, params={PARAMS_KEY: {}}, cached_tokens=None)
