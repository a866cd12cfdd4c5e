"""What each call finds cached and what each session has cost, counted as the router counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefillshare_prefix import History, Layout

from ._asking import Ask, salted
from ._breaks import PrefixBreak
from ._cache import PrefixCache
from ._rendering import Counted

PREFILL_WORKER = "prefill-0"
BYTES_PER_TOKEN = 1000
"""KV bytes of one token: a round number, so that tests can be read."""
_KEPT_CALLS = 256
_SUMS = (
    "calls",
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "handoff_bytes",
    "generated_tokens",
    "per_model_prefill_tokens",
    "prefills_ahead",
)


@dataclass(frozen=True, slots=True)
class Account:
    """One answered call, in tokens."""

    session: str | None
    role: str
    affinity: str
    prompt: int
    context: int
    cached: int
    computed: int
    received: int
    """Prompt tokens whose KV was handed off; `reused` are those the decode worker still held."""
    reused: int
    sequences: int
    generated: int
    shared: int
    """Leading tokens of the prompt that an earlier prompt of the session had as well."""
    shared_context: int
    """Those of them that belong to the context."""
    shareable: int
    """Context tokens that an earlier call of the session had read, shared or not."""
    per_model: int | None
    """What a prefill worker for this role alone would have computed, but for what was cached
    before the session read it; None without a session."""
    broken: PrefixBreak | None

    def report(self) -> dict[str, Any]:
        """The `prefillshare` object of the answer."""
        return {
            "session": self.session,
            "role": self.role,
            "prefill_worker": PREFILL_WORKER,
            "decode_worker": f"{self.role}-0",
            "affinity": self.affinity,
            "cached_tokens": self.cached,
            "computed_tokens": self.computed,
            "handoff_bytes": self.received * BYTES_PER_TOKEN,
            "base_tokens_received": self.received,
            "base_tokens_reused": self.reused,
            "decode_prompt_tokens_computed": self.sequences,
            "resumed": 0,
            "per_model_prefill_tokens": self.per_model,
            "break": self.broken and self.broken.report(),
        }

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.generated,
            "completion_tokens": self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def _caches() -> defaultdict[Any, PrefixCache]:
    return defaultdict(PrefixCache)


@dataclass
class Session:
    """A live session."""

    id: str
    history: History
    """Whether contexts go on, as the layout has it."""
    talk: History
    """The same for the conversation alone, whatever the layout."""
    contexts: PrefixCache = field(default_factory=PrefixCache)
    prompts: defaultdict[object, PrefixCache] = field(default_factory=_caches)
    """By cache (`Ask.cache`)."""
    longest: int = 0
    latest: int = 0
    """Context tokens: of the longest context, and of the latest."""
    grown: bool = False
    """It has a context of its own, beside those of its parent."""
    own: defaultdict[str, PrefixCache] = field(default_factory=_caches)
    """Contexts by role: what a prefill worker for this role alone would have cached."""
    tails: set[tuple[str, ...]] = field(default_factory=set)
    found: set[int] = field(default_factory=set)
    """Beginnings of prompts, by their number in `read`, that were cached before the session read
    them."""
    read: PrefixCache = field(default_factory=PrefixCache)
    totals: Counter[str] = field(default_factory=Counter)
    roles: dict[str, None] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def fork(self, session_id: str) -> Session:
        made = Session(
            session_id,
            self.history.fork(),
            self.talk.fork(),
            self.contexts.copy(),
            longest=self.longest,
            latest=self.latest,
            tails=set(self.tails),
            found=set(self.found),
            read=self.read.copy(),
        )
        made.prompts.update({mode: cache.copy() for mode, cache in self.prompts.items()})
        made.own.update({role: cache.copy() for role, cache in self.own.items()})
        return made

    def broken(self, body: Mapping[str, Any], counted: Counted) -> PrefixBreak | None:
        """Why a request does not go on from what the session sent before; None if it does."""
        # A child knows its parent's contexts and need not go on with one of them.
        why = self.history.compare(body) if self.grown else None
        if why is None:
            return None
        common = self.contexts.common(counted.context)
        if counted.before:
            caches = self.prompts.values()
            common = max((cache.common(counted.whole) for cache in caches), default=0)
        return PrefixBreak(why, common, max(self.latest - common, 0))

    def keep(
        self,
        mode: object,
        counted: Counted,
        body: Mapping[str, Any],
        answers: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        for answer in answers or (None,):
            self.history.keep(body, answer)
            self.talk.keep(body, answer)
        self.contexts.add(counted.context)
        self.prompts[mode].add(counted.whole)
        self.latest = len(counted.context)
        self.longest = max(self.longest, self.latest)
        self.grown = True

    def per_model(self, role: str, counted: Counted, shared: int, cached: int) -> int:
        """Tokens of a prompt that are new to a role; from now on it knows them.

        Its instructions and tools count once, as if they stood at the head of its prompts. What
        was `cached`, and not `shared` with an earlier prompt, other sessions had computed.
        """
        context, tail = counted.context, (role, *counted.before, *counted.after)
        numbers = self.note_found(counted.whole, shared, cached)
        start, end = len(counted.before), len(counted.before) + len(context)
        own = [number not in self.found for number in numbers]
        new = sum(own[start + self.own[role].common(context) : end])
        if tail not in self.tails:
            new += sum(own[:start] + own[end:])
        self.own[role].add(context)
        self.tails.add(tail)
        return new

    def note_found(self, prompt: Sequence[str], shared: int, cached: int) -> list[int]:
        """Note what was cached before any call of the session read it; returns its beginnings."""
        numbers = self.read.add(prompt)
        self.found.update(numbers[shared:cached])
        return numbers

    def count(self, account: Account) -> None:
        self.roles[account.role] = None
        amounts = (
            1,
            account.prompt,
            account.cached,
            account.computed,
            account.received * BYTES_PER_TOKEN,
            account.generated,
            account.per_model,
            0,
        )
        self.calls.append(
            {
                "index": self.totals["calls"],
                "role": account.role,
                "prompt_tokens": account.prompt,
                "context_tokens": account.context,
                "shared_tokens": account.shared,
                "cached_tokens": account.cached,
                "computed_tokens": account.computed,
                "break": account.broken and account.broken.report(),
            }
        )
        del self.calls[:-_KEPT_CALLS]
        self.totals.update(dict(zip(_SUMS, amounts, strict=True)))

    def report(self) -> dict[str, Any]:
        """What GET /v1/sessions/{id} answers."""
        return {
            "id": self.id,
            "object": "prefillshare.session",
            **{name: self.totals[name] for name in _SUMS},
            "roles": list(self.roles),
            "prefill_worker": PREFILL_WORKER,
        }


class Ledger:
    """One prefill worker, a decode worker for each role, and the sessions. Used under a lock."""

    def __init__(self, block_size: int, layout: Layout) -> None:
        self._block_size = block_size
        self._layout: Layout = layout
        self._prefill: defaultdict[object, PrefixCache] = _caches()
        self._decode: defaultdict[object, PrefixCache] = _caches()
        self._contexts = PrefixCache()
        self.sessions: dict[str, Session] = {}

    def opened(self, session_id: str | None, parent_id: str | None) -> Session | None:
        """The session of a call, made if it is new. It lives once something is counted in it."""
        if session_id is None:
            return None
        if session_id in self.sessions:
            return self.sessions[session_id]
        parent = self.sessions.get(parent_id or "")
        if parent is not None:
            return parent.fork(session_id)
        return Session(session_id, History(self._layout), History())

    def broken(self, ask: Ask, counted: Counted) -> PrefixBreak | None:
        """The break that a call would be, before anything is counted."""
        session = self.opened(ask.session, ask.parent)
        return session.broken(ask.body, counted) if session is not None else None

    def account(
        self, ask: Ask, counted: Counted, answers: Sequence[Mapping[str, Any]], generated: int
    ) -> Account:
        """Count a call that is answered, and remember its prompt."""
        session = self.opened(ask.session, ask.parent)
        whole, context, start = counted.whole, counted.context, len(counted.before)
        mode = ask.cache
        shared, affinity = 0, "none"
        if session is None:
            shareable = _whole_messages(counted, self._contexts.common(context))
        else:
            shared = session.prompts[mode].common(whole)
            shareable = session.contexts.common(context)
            if session.talk.compare(ask.body) is not None:
                shareable = min(len(context), session.longest)
            affinity = self._affinity(session)
        broken = None if session is None else session.broken(ask.body, counted)
        cached = self._cached(mode, whole)
        per_model = None
        if session is not None:
            per_model = session.per_model(ask.role, counted, shared, cached)
        # Each further choice is prefilled anew, and finds what the first one left.
        again = len(whole) - self._rounded(len(whole) - 1)
        reused = min(self._decode[ask.role, mode].common(whole), len(whole) - 1)
        account = Account(
            session=ask.session,
            role=ask.role,
            affinity=affinity,
            prompt=len(whole),
            context=len(context),
            cached=cached,
            computed=len(whole) - cached + (ask.n - 1) * again,
            received=len(whole) - 1 - reused,
            reused=reused + (ask.n - 1) * (len(whole) - 1),
            sequences=ask.n,
            generated=generated,
            shared=shared,
            shared_context=min(max(shared - start, 0), len(context)),
            shareable=shareable,
            per_model=per_model,
            broken=broken,
        )
        self._prefill[mode].add(whole)
        self._decode[ask.role, mode].add(whole)
        self._contexts.add(context)
        if session is not None:
            session.keep(mode, counted, ask.body, answers)
            session.count(account)
            self.sessions[session.id] = session
            if ask.final:
                del self.sessions[session.id]
        return account

    def prefill(
        self,
        session: Session,
        counted: Counted,
        body: Mapping[str, Any],
        broken: PrefixBreak | None,
    ) -> dict[str, Any]:
        """Read a context ahead of the calls; returns what POST …/prefill answers."""
        whole, mode = counted.whole, salted(body)
        cached = self._cached(mode, whole)
        affinity = self._affinity(session)
        shared = session.prompts[mode].common(whole)
        session.note_found(whole, shared, cached)
        self._prefill[mode].add(whole)
        self._contexts.add(whole)
        session.keep(mode, counted, body)
        session.totals.update(prefills_ahead=1, computed_tokens=len(whole) - cached)
        self.sessions[session.id] = session
        return {
            "id": session.id,
            "object": "prefillshare.prefill",
            "prefill_worker": PREFILL_WORKER,
            "affinity": affinity,
            "prompt_tokens": len(whole),
            "cached_tokens": cached,
            "computed_tokens": len(whole) - cached,
            "break": broken and broken.report(),
        }

    def _affinity(self, session: Session) -> str:
        """A child starts on its parent's prefill worker, so it is at home from its first call."""
        return "hit" if session.id in self.sessions or session.longest else "new"

    def _cached(self, mode: object, whole: list[str]) -> int:
        # The last token is always computed, for its logits.
        return self._rounded(min(self._prefill[mode].common(whole), len(whole) - 1))

    def _rounded(self, count: int) -> int:
        return count // self._block_size * self._block_size


def _whole_messages(counted: Counted, common: int) -> int:
    """`common` context tokens without those of a message that is only begun."""
    return max((end for end in counted.ends_of_messages() if end <= common), default=0)
