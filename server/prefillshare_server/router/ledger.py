"""What a session has already tokenised and read: reused ids, and where a context broke off.

Contexts of one session mostly extend each other. A kept context is a chain of pieces, each with
its text, its ids and a link to the piece it follows, so a session costs about as much memory as
its longest contexts. Pieces that no kept end leads to are garbage.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from pydantic_core import to_json

KEPT_ENDS = 16
"""Ends of contexts and of generated answers: those of the eight or so most recent calls."""

Cache = tuple[str, str]
"""A prefix cache: a worker's, and in it the part for one cache salt."""


def cache(worker_id: str, salt: Any) -> Cache:
    """The one that calls with this `cache_salt` share on a worker."""
    return worker_id, to_json(salt).decode()


class Piece:
    """A stretch of context after `parent`. Immutable but for who had it, where, and `said`."""

    __slots__ = (
        *("caches", "chars", "found", "ids", "parent", "roles", "said", "tail_found", "text"),
        "tokens",
    )

    def __init__(self, parent: Piece | None, text: str | None, ids: Sequence[int]) -> None:
        self.parent = parent
        self.text = text
        """None where the client sent ids."""
        self.ids = array("I", ids)
        self.chars: int = (parent.chars if parent else 0) + len(text or "")
        self.tokens: int = (parent.tokens if parent else 0) + len(ids)
        """Both count from the start of the context to the end of this piece."""
        self.roles: set[str] = set()
        """Roles that had the context up to here prefilled."""
        self.caches: set[Cache] = set()
        """Where the base computed it, for whomever; it may have been dropped since."""
        self.found = bytes(len(ids))
        """1 for each id that was cached when the session first read it: another one's work."""
        self.tail_found = 0
        """The same of a tail that came behind, as the count of its leading ids."""
        self.said: tuple[int, ...] = ()
        """The messages of the context up to here, as breaks.py numbers them; none of an answer."""

    def context(self) -> str | None:
        """Text from the start of the context to the end of this piece; None where ids were sent."""
        texts = [piece.text for piece in self.path()]
        return None if None in texts else "".join(text or "" for text in texts)

    def path(self) -> list[Piece]:
        """The pieces from the start of the context to this one."""
        pieces: list[Piece] = []
        piece: Piece | None = self
        while piece is not None:
            pieces.append(piece)
            piece = piece.parent
        return pieces[::-1]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest kept context that a text extends and whose ids it can reuse."""

    end: Piece | None = None
    ids: tuple[int, ...] = ()
    extends: bool = True
    """Whether the text extends a recent context, and no other is like it any further. If not, it
    forks off what was kept, or it broke: the messages tell (breaks.py)."""

    @property
    def chars(self) -> int:
        """Length of the matched text."""
        return self.end.chars if self.end else 0


class Lost(NamedTuple):
    """What a context that leaves the kept ones costs."""

    token_index: int
    """Leading tokens it still shares with a kept one."""
    lost_tokens: int
    """Tokens of the session's latest context behind that point."""


class Read(NamedTuple):
    """What a session had read of a prompt before, in leading tokens."""

    by_role: int
    """By the role that asks."""
    shared: int
    """By any role, or ahead of calls."""
    found: bytes
    """`Piece.found` of the shared ones."""
    readers: frozenset[str]
    """Who read a context that ends there: a tail of theirs came behind it."""


class Ledger:
    """Kept contexts of one session. Used from the event loop only; nothing here blocks."""

    def __init__(self) -> None:
        self._ends: OrderedDict[Piece, None] = OrderedDict()
        self._latest: Piece | None = None

    def fork(self) -> Self:
        """A ledger that knows the same contexts and goes its own way."""
        copy = type(self)()
        copy._ends = self._ends.copy()
        copy._latest = self._latest
        return copy

    def match(self, text: str, splits_at: Callable[[str, int], bool]) -> Match:
        """Find what `text` can reuse; its tokens are only cut where `splits_at` allows it."""
        if not self._ends:
            return Match()
        fits: set[Piece] = set()
        best: Piece | None = None
        parts = False
        for piece in self._pieces():
            if piece.text is None or (piece.parent and piece.parent not in fits):
                continue
            start = piece.chars - len(piece.text)
            if text.startswith(piece.text, start):
                fits.add(piece)
                if (best is None or piece.chars > best.chars) and splits_at(text, piece.chars):
                    best = piece
            elif text.startswith(piece.text[:1], start):
                parts = True
        extends = not parts and not fits.isdisjoint(self._ends)
        ids = tuple(i for piece in best.path() for i in piece.ids) if best else ()
        return Match(best, ids, extends)

    def contexts(self) -> Iterator[Piece]:
        """Ends of kept contexts that were sent as messages, the latest first."""
        return (end for end in reversed(self._ends) if end.said)

    def lost(self, ids: Sequence[int]) -> Lost:
        """Where the tokens of a context that extends no recent one leave the kept ones."""
        common = max(self._common(ids).values(), default=0)
        latest = self._latest.tokens if self._latest else 0
        return Lost(token_index=common, lost_tokens=max(latest - common, 0))

    def read(self, role: str | None, ids: Sequence[int], *, isolated: bool = False) -> Read:
        """How much of a prompt the session has read; with `isolated` only what `role` has.

        None for a role is a prefill ahead of calls.
        """
        common = self._common(ids)
        by_role = max((n for piece, n in common.items() if role in piece.roles), default=0)
        read = [p for p in common if (role in p.roles if isolated else p.roles or p.caches)]
        nearest = max(read, key=lambda piece: common[piece], default=None)
        if nearest is None:
            return Read(0, 0, b"", frozenset())
        shared = common[nearest]
        ends = (piece.roles for piece in read if piece.tokens == common[piece] == shared)
        found = b"".join(piece.found for piece in nearest.path())[:shared]
        return Read(by_role, shared, found, frozenset().union(*ends))

    def cached(self, ids: Sequence[int], where: Cache) -> int:
        """How many leading ones of `ids` the base computed before, there."""
        return max((n for p, n in self._common(ids).items() if where in p.caches), default=0)

    def first_read(self, end: Piece, before: Read, cached: int, shared: int) -> int:
        """Note of how much of a kept context the KV was there before this session read any of it.

        `before` is what had been read of it then, and `shared` how many leading tokens with what
        had stood behind it; `cached` how many were found. Returns how many of its tokens are new to
        the role and were computed by this session.
        """
        found = before.found.ljust(shared, b"\0")
        found += b"\1" * (min(cached, end.tokens) - shared)
        found = found.ljust(end.tokens, b"\0")
        path = end.path()
        for piece in path:
            if piece.tokens > before.shared:
                piece.found = found[piece.tokens - len(piece.ids) : piece.tokens]
        return b"".join(piece.found for piece in path).count(0, before.by_role)

    def keep_context(
        self, after: Piece | None, text: str | None, ids: Sequence[int], role: str | None
    ) -> Piece | None:
        """Remember a context that `role` had prefilled: `after`, and then `text` as `ids`.

        Returns its end; None for the empty context. With None for a role it is yet to be
        prefilled.
        """
        end = self._piece(after, text, ids) if ids else after
        if end is not None:
            if role is not None:
                self.mark(end, role)
            self._touch(end)
            self._latest = end
        return end

    def mark(self, end: Piece, role: str) -> None:
        """Note that `role` had the context prefilled that ends with `end`."""
        for piece in end.path():
            piece.roles.add(role)

    def mark_cached(self, end: Piece | None, where: Cache) -> None:
        """Note where the base computed the context that ends with `end`."""
        for piece in end.path() if end is not None else ():
            piece.caches.add(where)

    def forget(self, end: Piece) -> None:
        """Drop a kept context that was not prefilled after all, unless it was for another call."""
        if not end.roles and not end.caches:
            self._ends.pop(end, None)
        if self._latest is end and end not in self._ends:
            self._latest = next(self.contexts(), None)

    def keep_answer(self, after: Piece | None, text: str, ids: Sequence[int]) -> None:
        """Remember the answer to a context, with the ids that were generated."""
        self._touch(self._piece(after, text, ids))

    def _piece(self, after: Piece | None, text: str | None, ids: Sequence[int]) -> Piece:
        for end in self._ends:
            # The first ids of a text stay, so that concurrent branches agree on them.
            if end.parent is after and text is not None and end.text == text:
                return end
        return Piece(after, text, ids)

    def _touch(self, end: Piece) -> None:
        self._ends[end] = None
        self._ends.move_to_end(end)
        while len(self._ends) > KEPT_ENDS:
            self._ends.popitem(last=False)

    def _pieces(self) -> Iterator[Piece]:
        """Every kept piece once, parents first."""
        seen: set[Piece] = set()
        for end in self._ends:
            chain: list[Piece] = []
            piece: Piece | None = end
            while piece is not None and piece not in seen:
                seen.add(piece)
                chain.append(piece)
                piece = piece.parent
            yield from reversed(chain)

    def _common(self, ids: Sequence[int]) -> dict[Piece, int]:
        """For every piece, how many leading tokens of its context equal those of `ids`."""
        wanted = array("I", ids)
        common: dict[Piece, int] = {}
        for piece in self._pieces():
            start = piece.tokens - len(piece.ids)
            count = common[piece.parent] if piece.parent else 0
            # Behind a difference nothing counts: KV depends on all tokens before it.
            if count == start:
                count += _common_prefix(piece.ids, wanted[start : piece.tokens])
            common[piece] = count
        return common


def _common_prefix(left: array[int], right: array[int]) -> int:
    """Length of the common prefix, by a few block comparisons instead of one per token."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
