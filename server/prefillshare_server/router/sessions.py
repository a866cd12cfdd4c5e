"""Sessions: which prefill worker holds a conversation's KV, and what the session has cost."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from prefillshare_prefix import History, Layout
from prefillshare_server.router.identity import Identity
from prefillshare_server.router.ledger import Ledger, Piece, Read
from prefillshare_server.router.tally import Tally
from prefillshare_server.router.tokens import Tokens
from prefillshare_server.router.turns import Turns

_KEPT_TAILS = 8
KEPT_CALLS = 256

KEPT_HISTORY = 64
"""Contexts whose messages are remembered: with fewer, many branches at once would look edited."""


@dataclass(slots=True)
class Totals:
    """Sums over a session's calls; tokens and bytes. Work done for a call that failed later
    counts as well, but for colocated engines, which tell at the end of an answer."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Found in the prefill worker's prefix cache."""
    computed_tokens: int = 0
    """Computed by the prefill worker, for calls or ahead of them."""
    handoff_bytes: int = 0
    generated_tokens: int = 0
    per_model_prefill_tokens: int = 0
    """What one prefill worker per role would have computed: for each role the tokens that are new
    to it. Its instructions and tools count once, as if they stood at the head of its prompts.
    Tokens that were cached before the session read them do not count: other sessions had them
    computed, and a role's own worker might have them as well."""
    prefills_ahead: int = 0
    """Contexts that were prefilled before a call needed them. They are no calls."""


@dataclass(slots=True, eq=False)
class CallRecord:
    """One call of a session, as `GET /v1/sessions/{id}/calls` lists it."""

    index: int
    """From 0, over all calls of the session."""
    role: str
    prompt_tokens: int
    context_tokens: int
    """Of these, the ones the session's next calls repeat."""
    shared_tokens: int
    """Leading ones that an earlier prompt of the session had as well, cached or not."""
    cached_tokens: int | None
    computed_tokens: int | None
    broken: Mapping[str, Any] | None

    def report(self) -> dict[str, Any]:
        """The record as JSON."""
        fields = asdict(self)
        broken = fields.pop("broken")
        return {**fields, "break": broken}


class Running(NamedTuple):
    """A prefill ahead (ahead.py), from its arrival on."""

    noted: asyncio.Future[Any]
    """Done when the session's ledger knows the context."""
    task: asyncio.Task[Any]


@dataclass(slots=True, eq=False)
class Session:
    """One conversation, whichever roles take part. Lives in the event loop's thread."""

    id: str
    ledger: Ledger
    turns: Turns
    history: History = field(default_factory=History)
    """The messages of the contexts in the ledger: they tell why one broke."""
    grown: bool = False
    """It has a context of its own, beside those of its parent."""
    ahead: Running | None = None
    """The latest prefill ahead of a call; it ends after those before it."""
    prefills_running: int = 0
    """Prefills ahead that run or wait for another."""
    calls: deque[CallRecord] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))
    """The latest."""
    pins: dict[str | None, str] = field(default_factory=dict)
    """The prefill worker by pool: None is the pool of all roles. Empty until a prefill succeeded,
    or a call was sent to a colocated engine."""
    placing: dict[str | None, str] = field(default_factory=dict)
    """By pool, where the first prefill is running: calls that start meanwhile go there too."""
    totals: Totals = field(default_factory=Totals)
    roles: dict[str, None] = field(default_factory=dict)
    """In order of their first call."""
    decode_workers: dict[str, str] = field(default_factory=dict)
    """By pool, the last one: it holds base KV of the session."""
    tails: dict[str, list[Sequence[int]]] = field(default_factory=dict)
    """By role, ids of the recent ends of its prompts: instructions and tools."""
    last_role: str | None = None
    in_flight: int = 0
    used_at: float = 0.0

    @property
    def prefill_worker(self) -> str | None:
        """The pin; several, in one text, where each role has prefill workers of its own."""
        return ",".join(self.pins.values()) or None

    def new_in_tail(self, role: str, ids: Sequence[int]) -> int:
        """How many ids of the end of a prompt are new to `role`, which has them at hand from now.

        A list of who said what grows with every call; the instructions around it are the same.
        """
        known = self.tails.setdefault(role, [])
        fresh = min((_changed(tail, ids) for tail in known), default=len(ids))
        if fresh:
            known.append(ids)
            del known[:-_KEPT_TAILS]
        return fresh

    def shared_tokens(self, before: Read, ids: Sequence[int]) -> int:
        """How many leading `ids` of a prompt an earlier one of the session had as well."""
        rest = ids[before.shared :]
        tails = (tail for role in before.readers for tail in self.tails.get(role, ()))
        return before.shared + max((_common(tail, rest) for tail in tails), default=0)

    def keep_answer(
        self, after: Piece | None, opener: tuple[str, Sequence[int]], tally: Tally, tokens: Tokens
    ) -> None:
        """Remember what was generated after the context that ends with `after`.

        `opener` stands between the two. Nothing is kept of an answer whose ids do not spell out
        what the client sends back.
        """
        written = tally.written(tokens)
        if written is None:
            return
        if tally.tool_calls:
            self.turns.keep(written.text, tally.content, tally.tool_calls)
        opener_text, opener_ids = opener
        if opener_text:
            self.ledger.keep_answer(after, opener_text + written.text, [*opener_ids, *written.ids])

    def report(self) -> dict[str, Any]:
        """What `GET /v1/sessions/{id}` answers."""
        return {
            "id": self.id,
            "object": "prefillshare.session",
            **asdict(self.totals),
            "roles": list(self.roles),
            "prefill_worker": self.prefill_worker,
        }


def _changed(before: Sequence[int], after: Sequence[int]) -> int:
    """Length of `after` without the start and the end that it has in common with `before`."""
    start = _common(before, after)
    rest = min(len(before), len(after)) - start
    end = next((i for i in range(rest) if before[-1 - i] != after[-1 - i]), rest)
    return len(after) - start - end


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


class Sessions:
    """All live sessions by id: the pin depends on the session alone, never on the model."""

    def __init__(
        self,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        layout: Layout = "context_first",
    ) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._layout = layout
        self._sessions: dict[str, Session] = {}
        self.pinned: Counter[str] = Counter()
        """Sessions per prefill worker."""
        self._on_end: Callable[[str], None] = lambda _: None

    @property
    def in_flight(self) -> int:
        """Calls that hold a session now."""
        return sum(session.in_flight for session in self._sessions.values())

    @contextmanager
    def opened(self, who: Identity) -> Iterator[Session | None]:
        """The session of a call for as long as the call runs; None for a call without one.

        On leaving, a session that never got a prefill worker is forgotten, and so is one whose
        final call came to its end.
        """
        if who.session is None:
            yield None
            return
        session = self._sessions.get(who.session) or self._new(who.session, who.parent)
        session.in_flight += 1
        finished = False
        try:
            yield session
            finished = True
        finally:
            session.in_flight -= 1
            session.used_at = self._clock()
            unbound = not session.pins and session.in_flight == 0
            if unbound or (finished and who.final):
                self._forget(session)

    def bind(self, session: Session, worker: str, pool: str | None = None) -> None:
        """Pin `session` to `worker`, which has its context in the cache, or will have."""
        if not self.holds(session):
            return  # Ended while the call ran: nothing may come back to life.
        self.unbind(session, pool)
        session.pins[pool] = worker
        self.pinned[worker] += 1

    def unbind(self, session: Session, pool: str | None = None) -> None:
        """Take the pin back: nothing was prefilled there after all."""
        if self.holds(session) and pool in session.pins:
            self.pinned[session.pins.pop(pool)] -= 1

    def look(self, who: Identity) -> Session | None:
        """The session that a call would have, or its parent if it would be new. Only to read."""
        session = self._sessions.get(who.session or "")
        if session is None and who.session is not None and who.parent is not None:
            return self.get(who.parent)
        return session

    def get(self, session_id: str) -> Session | None:
        """The live session of this id."""
        session = self._sessions.get(session_id)
        return session if session is not None and session.pins else None

    def listen(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end` with the id of every session that was forgotten."""
        self._on_end = on_end

    def has(self, session_id: str) -> bool:
        """Whether there is a session of this id, also one that has no prefill worker yet."""
        return session_id in self._sessions

    def holds(self, session: Session) -> bool:
        """Whether this session has not ended, nor a new one its id."""
        return self._sessions.get(session.id) is session

    def end(self, session_id: str) -> bool:
        """Forget a session; calls in flight finish undisturbed. False if there is none."""
        session = self.get(session_id)
        if session is not None:
            self._forget(session)
        return session is not None

    def sweep(self) -> int:
        """Forget the sessions that were idle for their time to live; returns how many."""
        deadline = self._clock() - self._ttl_s
        idle = [s for s in self._sessions.values() if not s.in_flight and s.used_at <= deadline]
        for session in idle:
            self._forget(session)
        return len(idle)

    def _new(self, session_id: str, parent_id: str | None) -> Session:
        parent = self.get(parent_id) if parent_id is not None else None
        session = Session(
            session_id,
            ledger=parent.ledger.fork() if parent else Ledger(),
            turns=parent.turns.fork() if parent else Turns(),
            history=parent.history.fork() if parent else History(self._layout, kept=KEPT_HISTORY),
            tails={role: [*tails] for role, tails in parent.tails.items()} if parent else {},
        )
        self._sessions[session_id] = session
        for pool, worker in (parent.pins if parent else {}).items():
            self.bind(session, worker, pool)
        return session

    def _forget(self, session: Session) -> None:
        if self.holds(session):
            del self._sessions[session.id]
            self.pinned.subtract(session.pins.values())
            self._on_end(session.id)
