"""How many sessions are active at once, and the line in which calls of further ones wait.

The admission limit of the paper's section 4: KV of more sessions than the prefill workers can keep
would only push each other's out. A session is active from its first call until it ends.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from prefillshare_server.router.errors import no_place, session_limit
from prefillshare_server.router.identity import Identity
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.sessions import Sessions


@dataclass(slots=True, eq=False)
class _Waiting:
    who: Identity
    granted: asyncio.Future[None] = field(default_factory=asyncio.Future)


class SessionLimit:
    """Lets calls in. Lives in the event loop's thread."""

    def __init__(
        self, sessions: Sessions, metrics: Metrics, *, most: int | None, queue: int, queue_s: float
    ) -> None:
        """`most` sessions at once, None for any number; `queue` calls wait, for `queue_s` each."""
        self._sessions = sessions
        self._most = most
        self._queue = queue
        self._queue_s = queue_s
        self._active: set[str] = set()
        """Sessions that have not ended, or have a call that was let in and runs."""
        self._calls: Counter[str] = Counter()
        """Of each session, calls that were let in and run."""
        self._sessionless = 0
        """Running calls without a session: each counts as one."""
        self._line: deque[_Waiting] = deque()
        sessions.listen(self._ended)
        metrics.watch_sessions(lambda: self.active, lambda: self.waiting)

    @property
    def active(self) -> int:
        """Sessions that count now, and calls without one."""
        return len(self._active) + self._sessionless

    @property
    def waiting(self) -> int:
        """Calls in line."""
        return len(self._line)

    def has_place(self, who: Identity) -> bool:
        """Whether a call is let in without waiting, in which case `entered` awaits nothing.

        A fork of an active session always is, also beyond the limit: its parent, which keeps its
        own place, may be waiting for it.
        """
        if self._most is None or self.active < self._most:
            return True
        return who.session is not None and not self._active.isdisjoint((who.session, who.parent))

    async def entered(self, who: Identity) -> AbstractContextManager[float]:
        """Wait for the call's turn; it has a place until the context is left, which must be entered
        at once. Its value is for how many seconds the call waited.

        Raises RouterError: 429 where too many calls wait, 504 if there is no place in time.
        """
        if self.has_place(who):
            self._let_in(who)
            return self._place(who, 0.0)
        loop = asyncio.get_running_loop()
        start, most = loop.time(), self._most or 0
        if len(self._line) >= self._queue:
            raise session_limit(most, self.waiting)
        waiting = _Waiting(who)
        self._line.append(waiting)
        try:
            # Does not cancel what it waits for, so no place is granted and lost.
            await asyncio.wait([waiting.granted], timeout=self._queue_s)
        except BaseException:
            if waiting.granted.done():
                self._leave(who)
            else:
                self._line.remove(waiting)
            raise
        if waiting.granted.done():
            return self._place(who, loop.time() - start)
        self._line.remove(waiting)
        raise no_place(most, self._queue_s)

    @contextmanager
    def _place(self, who: Identity, waited_s: float) -> Iterator[float]:
        try:
            yield waited_s
        finally:
            self._leave(who)

    def _let_in(self, who: Identity) -> None:
        if who.session is None:
            self._sessionless += 1
        else:
            self._active.add(who.session)
            self._calls[who.session] += 1

    def _leave(self, who: Identity) -> None:
        if who.session is None:
            self._sessionless -= 1
        else:
            self._calls[who.session] -= 1
            if not self._calls[who.session]:
                del self._calls[who.session]
                if not self._sessions.has(who.session):
                    self._active.remove(who.session)
        self._serve()

    def _ended(self, session_id: str) -> None:
        """A session that ended while calls of it run counts until the last of them is over."""
        if session_id not in self._calls:
            self._active.discard(session_id)
            self._serve()

    def _serve(self) -> None:
        """Let in, from the head of the line, whoever has a place."""
        while waiting := next((w for w in self._line if self.has_place(w.who)), None):
            self._line.remove(waiting)
            self._let_in(waiting.who)
            waiting.granted.set_result(None)
