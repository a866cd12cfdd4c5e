"""What a session has sent lately, and whether a new request goes on from any of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from prefillshare_prefix.causes import Break, Cause, Layout
from prefillshare_prefix.compare import (
    Divergence,
    common,
    divergence,
    trimming,
    turned_round,
)
from prefillshare_prefix.head import head_break
from prefillshare_prefix.messages import Message, Request, read_request

KEPT_CONTEXTS = 16
_KEPT_ANSWERS = 16
_SENT_NUMBERS = 4096
_COMPARED = 8
# How much a difference in the head explains, the most specific first.
_EXPLAINS = [
    Cause.TIMESTAMP,
    Cause.RANDOM_ID,
    Cause.WHITESPACE,
    Cause.ARGUMENTS_REWRITTEN,
    Cause.TOOL_ORDER,
    Cause.TOOLS_CHANGED,
    Cause.SYSTEM_CHANGED,
    Cause.ROLE_PROMPT_FIRST,
]


class _Kept(NamedTuple):
    request: Request
    answers: dict[Message, None]
    """Answers that were given to exactly this context."""


class History:
    """The latest contexts of one session, at most `kept`; equal messages are stored once.

    Not thread-safe. Nothing here raises, whatever the requests look like.
    """

    def __init__(self, layout: Layout = "context_first", *, kept: int = KEPT_CONTEXTS) -> None:
        self._layout = layout
        self._limit = kept
        self._kept: OrderedDict[tuple[Any, ...], _Kept] = OrderedDict()
        self._messages: dict[Message, Message] = {}
        self._uses: dict[int, int] = {}  # by identity of a stored message: hashing texts is slow
        self._sent: dict[int, None] = {}  # contexts by number, far more than are kept

    def fork(self) -> History:
        """A history that knows the same contexts and goes its own way."""
        copy = History(self._layout, kept=self._limit)
        copy._kept.update(
            (key, _Kept(entry.request, dict(entry.answers))) for key, entry in self._kept.items()
        )
        copy._messages = dict(self._messages)
        copy._uses = dict(self._uses)
        copy._sent = dict(self._sent)
        return copy

    def __len__(self) -> int:
        """How many contexts are kept."""
        return len(self._kept)

    @property
    def stored_messages(self) -> int:
        """How many different messages are kept in memory."""
        return len(self._messages)

    def compare(self, request: Mapping[str, Any]) -> Break | None:
        """Why `request` goes on from none of the kept contexts; None when it does.

        A fork from any message of a kept context, a repeated request and the first one of a
        session are no breaks. Changes nothing.
        """
        asked = read_request(request, self._layout)
        # The kept objects, where equal: comparing an object with itself costs nothing.
        asked = asked._replace(context=tuple(self._messages.get(m, m) for m in asked.context))
        kept = [entry for entry in reversed(self._kept.values()) if entry.request.context]
        if not kept or not asked.context:
            return None
        if self._layout == "model":
            same_head = [entry for entry in kept if self._head(entry.request) == self._head(asked)]
            if not same_head:
                return _best_head_break([entry.request for entry in kept], asked)
            kept = same_head
        shared = [common(entry.request.context, asked.context) for entry in kept]
        if turned := _turned_round(kept, asked, max(shared)):
            return turned
        if self._is_step(asked):
            return None
        return _context_break(kept, shared, asked)

    def keep(self, request: Mapping[str, Any], answer: Mapping[str, Any] | None = None) -> None:
        """Remember a request's context, as the latest one.

        `answer`, the assistant message it got, is optional: it tells a branch with an answer of
        its own from a message that was edited.
        """
        asked = read_request(request, self._layout)
        if not asked.context:
            return
        asked = asked._replace(context=tuple(self._stored(m) for m in asked.context))
        key = (self._head(asked), asked.context)
        entry = self._kept.get(key)
        if entry is None:
            entry = self._kept[key] = _Kept(asked, {})
            for message in asked.context:
                self._uses[id(message)] = self._uses.get(id(message), 0) + 1
        self._kept.move_to_end(key)
        if answer is not None:
            entry.answers[_answer(answer, self._layout)] = None
            while len(entry.answers) > _KEPT_ANSWERS:
                del entry.answers[next(iter(entry.answers))]
        self._sent[self._number(asked, len(asked.context))] = None
        if len(self._sent) > _SENT_NUMBERS:
            del self._sent[next(iter(self._sent))]
        if len(self._kept) > self._limit:
            self._drop(next(iter(self._kept)))

    def forget(self, but: Mapping[str, Any] | None = None) -> None:
        """Take contexts back: all of them, or those that go beyond request `but`.

        For a session that ended or was rewound: what it sends next is no edit of what it sent. The
        contexts that `but` itself goes on from are kept.
        """
        rest = read_request(but, self._layout)
        head, context = self._head(rest), tuple(self._messages.get(m, m) for m in rest.context)
        for key, entry in list(self._kept.items()):
            length = len(entry.request.context)
            if but is None or key[0] != head or context[:length] != entry.request.context:
                self._drop(key)
        before = {self._number(rest, length) for length in range(len(context) + 1)}
        self._sent = {n: None for n in self._sent if but is not None and n in before}

    def _is_step(self, request: Request) -> bool:
        """Whether this is an answer to a context that was sent, and what follows on the answer.

        Then it may share the wording of later messages with other branches and is one itself.
        """
        context = request.context
        roles = [message.role for message in context]
        if "assistant" not in roles:
            return False
        answer = len(roles) - 1 - roles[::-1].index("assistant")
        return self._number(request, answer) in self._sent

    def _number(self, request: Request, length: int) -> int:
        """A number for the first messages of a context, equal for equal ones."""
        return hash((self._head(request), request.context[:length]))

    def _head(self, request: Request) -> tuple[Any, ...]:
        return (request.system, request.tools) if self._layout == "model" else ()

    def _stored(self, message: Message) -> Message:
        return self._messages.setdefault(message, message)

    def _drop(self, key: tuple[Any, ...]) -> None:
        for message in self._kept.pop(key).request.context:
            self._uses[id(message)] -= 1
            if not self._uses[id(message)]:
                del self._uses[id(message)], self._messages[message]


def _answer(message: Mapping[str, Any], layout: Layout) -> Message:
    given = {**message, "role": "assistant"}
    (read,) = read_request({"messages": [given]}, layout).context
    return read


def _best_head_break(kept: Sequence[Request], asked: Request) -> Break | None:
    """The break against the kept head that is nearest to the request's own."""
    found = [broken for request in kept if (broken := head_break(request, asked))]
    return min(found, key=_rank, default=None)


def _rank(broken: Break) -> int:
    return _EXPLAINS.index(broken.cause) if broken.cause in _EXPLAINS else len(_EXPLAINS)


def _turned_round(kept: Sequence[_Kept], asked: Request, shared: int) -> Break | None:
    if shared == len(asked.context):
        return None
    found = (turned_round(entry.request, asked, shared) for entry in kept)
    return next(filter(None, found), None)


def _context_break(kept: Sequence[_Kept], shared: Sequence[int], asked: Request) -> Break | None:
    longest = max(shared)
    nearest = [e for e, length in zip(kept, shared, strict=True) if length == longest]
    if longest == len(asked.context):
        return None
    # Contexts that end where the request parts from all others: it may have forked there.
    ends = [entry for entry in nearest if len(entry.request.context) == longest]
    if any(asked.context[longest] in entry.answers for entry in ends):
        return None
    others = [entry for entry in nearest if len(entry.request.context) > longest]
    compared = _likeliest([entry.request for entry in others], asked, longest)
    found = _weighed(compared, asked, forked=bool(ends))
    if found is not None and found.cause is not Cause.HISTORY_TRIMMED and longest:
        # What it shares may be no more than an answer that is given often.
        trimmed = (trimming(entry.request, asked, longest) for entry in kept[:_COMPARED])
        found = next(filter(None, trimmed), found)
    return found


def _weighed(compared: Sequence[Request], asked: Request, *, forked: bool) -> Break | None:
    """The break against contexts that part from `asked` in one place, if it is no fork of one."""
    found: list[Divergence | None] = []
    for request in compared:
        found.append(divergence(request, asked))
        if (last := found[-1]) and last.certain and last.found.cause is not Cause.UNRELATED:
            return last.found
    breaks = [each for each in found if each and (each.certain or not forked)]
    if len(breaks) < len(compared) and not any(each.certain for each in breaks):
        return None  # at least one of them it may have forked from
    return (
        min(breaks, key=lambda each: each.found.cause is Cause.UNRELATED).found if breaks else None
    )


def _likeliest(kept: Sequence[Request], asked: Request, shared: int) -> list[Request]:
    """The few contexts with which `asked` has the most messages in common, the latest first.

    Texts are compared with these only: many branches are kept, and each comparison costs.
    """
    later = {id(message) for message in asked.context[shared:]}
    again = [sum(id(message) in later for message in r.context[shared:]) for r in kept]
    order = sorted(range(len(kept)), key=lambda position: -again[position])
    if any(again):
        return [kept[position] for position in order[:_COMPARED]]
    # Nothing comes again. Contexts that part from `asked` with one message say the same of it,
    # but for those that end there.
    parting: dict[tuple[int, bool], Request] = {}
    for request in kept:
        parting.setdefault(
            (id(request.context[shared]), len(request.context) == shared + 1), request
        )
    return list(parting.values())[:_COMPARED]
