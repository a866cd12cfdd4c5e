"""Two requests: does the later one go on from the earlier one, and if not, why?

A context may go on from any message of an earlier one: that is a fork, and no break. A break needs
evidence that the later context means to go on with what was sent: messages that come again
behind the difference, or an answer to the message that differs. Without such evidence a first
message that differs is another task of the session, however alike the wording: the branches of a
map-reduce graph begin so. Only a long prompt in which nothing but a clock or an id is new is
called a break even then, since all of it behind the clock is computed again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import Match, SequenceMatcher
from itertools import takewhile
from typing import Any, NamedTuple

from prefillshare_prefix.causes import Break, Cause, Layout
from prefillshare_prefix.head import head_break
from prefillshare_prefix.messages import Message, Request, read_request, shown
from prefillshare_prefix.rewriting import changed_field, rewriting
from prefillshare_prefix.texts import (
    common_prefix,
    excerpts,
    likeness,
    one_line,
    only_clock_or_id,
    quoted,
)

_SUMMARY = re.compile(
    r"\bsummar(?:y|i[sz]ed?|i[sz]ing)\b|\brecap\b|\bconversation (?:so far|to date)\b",
    re.IGNORECASE,
)
_PERSONA = re.compile(r"\b(?:you are|you're|your (?:role|job|task) is|act as)\b", re.IGNORECASE)
_ASKS_FOR_IT = re.compile(
    r"^\W*(?:please |now |can you |could you )?(?:summari[sz]e|recap|write|give|create|make|"
    r"generate|produce|provide|draft|compose|update|extend|prepare)\b",
    re.IGNORECASE,
)
"""A first message that asks for a summary, and stands for none."""
_SENTENCE_END = re.compile(r"[.!?:]\s|\n")
_SAME_TASK = 20
_ALIKE = 0.5
_NEARLY_EQUAL = 0.8
_MEANS_SOMETHING = 10
_SAID_AGAIN = 40
SHARED_PROMPT = 200
"""Characters: some 50 tokens, a few blocks of a prefix cache. Less text than that behind a
difference is no loss to speak of, and as likely the common wording of several tasks."""


class Divergence(NamedTuple):
    """A context that stops going on from another."""

    found: Break
    certain: bool
    """False where it may be a fork just as well."""


def find_break(
    before: Mapping[str, Any], after: Mapping[str, Any], layout: Layout = "context_first"
) -> Break | None:
    """Why chat request `after` does not go on from `before`; None when it does, or forks off it.

    Both are request bodies with `messages` and, if any, `tools` and `model`. Never raises.
    """
    earlier, later = read_request(before, layout), read_request(after, layout)
    if layout == "model" and (found := head_break(earlier, later)):
        return found
    if turned := turned_round(earlier, later, 0):
        return turned
    diverged = divergence(earlier, later)
    return diverged.found if diverged else None


def common(before: Sequence[Message], after: Sequence[Message]) -> int:
    """How many leading messages two contexts share."""
    low, high = 0, min(len(before), len(after))
    while low < high:
        middle = (low + high + 1) // 2
        # In one piece, which is much faster than message by message.
        if tuple(before[low:middle]) == tuple(after[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def divergence(earlier: Request, later: Request) -> Divergence | None:
    """Why `later`'s context does not go on from `earlier`'s; None when it does, or forks."""
    found = _divergence(earlier.context, later.context, len(later.system))
    if found is None or found.found.cause not in (Cause.MESSAGE_EDITED, Cause.UNRELATED):
        return found
    one, other = earlier.context[0], later.context[0]
    if _is_other_persona(one.text, other.text):
        at = len(later.system)
        return found._replace(found=_edited(Cause.ROLE_PROMPT_FIRST, at, one, other))
    edited = found.found.cause is Cause.MESSAGE_EDITED
    if one == other or not edited or _alike(one.text, other.text):
        return found
    if _PERSONA.search(one.text) and _PERSONA.search(other.text):
        # Instructions in a first user message, as some frameworks send them.
        return found._replace(found=replace(found.found, cause=Cause.ROLE_PROMPT_FIRST))
    return found


def _is_other_persona(one: str, other: str) -> bool:
    """Whether two texts give one task to two roles: "You are a tester. Sort a list." for example.

    They must part in the sentence that names the role, and come together again in front of the
    task. Where they part behind it the task is another one.
    """
    named, renamed = _PERSONA.search(one), _PERSONA.search(other)
    if not named or not renamed or one[: named.start()] != other[: renamed.start()]:
        return False
    start = common_prefix(one, other)
    if start == min(len(one), len(other)) or _SENTENCE_END.search(one[named.end() : start]):
        return False
    end = common_prefix(one[start:][::-1], other[start:][::-1])
    if end < _SAME_TASK:
        return False
    apart = one[start : len(one) - end], other[start : len(other) - end]
    whole = min(len(one), len(other))
    return end >= whole / 2 or not any(map(_SENTENCE_END.search, apart))


def turned_round(earlier: Request, later: Request, shared: int) -> Break | None:
    """The break of a context that has `earlier`'s next messages under other roles.

    As in a debate, where each agent sees the other's turns as the user's. None where no more of
    them than `shared`, or too few words, are repeated so.
    """
    before, after = earlier.context, later.context
    start = common(before, after)
    pairs = zip(before[start:], after[start:], strict=False)
    same = list(takewhile(lambda pair: pair[0][1:] == pair[1][1:], pairs))  # all but the role
    lost = same[max(shared - start, 0) :]
    at = next((i for i, (one, other) in enumerate(lost) if one.role != other.role), None)
    if at is None or _length([one for one, _ in lost]) < _SAID_AGAIN:
        return None
    one, other = lost[at]
    place = len(later.system) + max(start, shared) + at
    detail = f"messages[{place}] ({_quoted(other)}) was the {one.role}'s before"
    return _break(Cause.ROLE_CHANGED, place, detail, one, other)


def trimming(earlier: Request, later: Request, shared: int) -> Break | None:
    """The break of a context that drops `earlier`'s first messages and goes on with the rest.

    None where that explains no more of its messages than `shared`.
    """
    before, after = earlier.context, later.context
    dropped = _dropped(before, after, 0)
    if not dropped or len(before) - dropped <= shared:
        return None
    return _trimmed(len(later.system), before[:dropped], after)


def _divergence(
    before: Sequence[Message], after: Sequence[Message], offset: int
) -> Divergence | None:
    index = common(before, after)
    old, new = before[index:], after[index:]
    if not old or not new:
        return None
    at = offset + index
    blocks = _matching(old, new)
    if not blocks:
        return _all_new(at, index, old, new)
    again = [message for b in blocks for message in old[b.a : b.a + b.size]]
    spoken = any(message.role not in ("user", "system") for message in again)
    several = spoken or len(again) > 1
    if dropped := _dropped(old, new, index):
        found = _trimmed(at, old[:dropped], new)
        return Divergence(found, several or not index)
    gone, put = old[: blocks[0].a], new[: blocks[0].b]
    end = blocks[-1]
    answered = _is_answered(new, len(old)) or (
        end.a + end.size == len(old) and _is_answered(new, end.b + end.size)
    )
    stands = _is_summary(put, gone) and not _ASKS_FOR_IT.search(new[0].text)
    told = several or answered or stands or _length(again) >= SHARED_PROMPT
    if gone and put and not told:
        # One short question again, about something else.
        return _another(at, index, old, new)
    found = _with_messages_again(at, gone, put, old, new)
    named = found.cause in (Cause.MESSAGE_INSERTED, Cause.HISTORY_TRIMMED, Cause.MESSAGES_REORDERED)
    return Divergence(found, several or not index or (answered and not named))


def _matching(old: Sequence[Message], new: Sequence[Message]) -> list[Match]:
    # As numbers, which are compared in no time.
    numbers: dict[Message, int] = {}
    one, other = ([numbers.setdefault(m, len(numbers)) for m in part] for part in (old, new))
    return [b for b in SequenceMatcher(None, one, other).get_matching_blocks() if b.size]


def _length(messages: Sequence[Message]) -> int:
    return sum(len(message.text) for message in messages)


def _dropped(old: Sequence[Message], new: Sequence[Message], index: int) -> int:
    """How many messages to drop from the front of `old` so that `new` goes on from it; 0 for none.

    Equal messages, as short answers are, come again in a trimmed context without having moved.
    """
    for count in range(1, len(old)):
        rest = len(old) - count
        if old[count] != new[0] or tuple(old[count:]) != tuple(new[:rest]):
            continue
        gone, added = old[:count], new[rest:]
        if not any(message in gone for message in added):
            return count
        if added[0].role != "assistant" or old[-1].role == "assistant":
            return 0  # no turn ends there, so this is another order
        swapped = (count == 1 and rest == 1 and index) or (
            count > 1 and tuple(added[:count]) == tuple(gone)
        )
        return 0 if swapped else count
    return 0


def _trimmed(at: int, gone: Sequence[Message], new: Sequence[Message]) -> Break:
    what = f"{len(gone)} messages" if len(gone) > 1 else "a message"
    are = "are" if len(gone) > 1 else "is"
    detail = f"{what} in front of messages[{at}] {are} gone: {_quoted(gone[0])}"
    return _break(Cause.HISTORY_TRIMMED, at, detail, gone[0], new[0])


def _with_messages_again(
    at: int,
    gone: Sequence[Message],
    put: Sequence[Message],
    old: Sequence[Message],
    new: Sequence[Message],
) -> Break:
    """`gone` became `put`, and the messages behind them come again."""
    counts, later = Counter(old), Counter(new)
    moved = [m for m in (*put, *gone) if counts[m] and counts[m] == later[m]]
    if moved:
        detail = f"messages[{at}] ({_quoted(new[0])}) was preceded by {_quoted(old[0])} before"
        return _break(Cause.MESSAGES_REORDERED, at, detail, old[0], new[0])
    if not gone:
        detail = f"messages[{at}] ({_quoted(put[0])}) stands in front of {_quoted(old[0])}"
        return _break(Cause.MESSAGE_INSERTED, at, detail, old[0], new[0])
    if not put:
        return _trimmed(at, gone, new)
    if cause := rewriting(gone[0], put[0]):
        return _edited(cause, at, gone[0], put[0])
    if _is_summary(put, gone) and not _ASKS_FOR_IT.search(put[0].text):
        # What comes again may be an answer that is given often: a summary is of all but the end.
        gone = old[: len(old) - _kept_end(old, new[len(put) :])]
    if len(gone) > len(put) and (
        _is_summary(put, gone) or (len(put) == 1 and len(gone) > 2 and put[0].role != "assistant")
    ):
        return _summarised(at, gone, put)
    extra = len(put) - len(gone)
    if extra > 0 and rewriting(gone[0], put[extra]):
        detail = f"messages[{at}] ({_quoted(put[0])}) stands in front of {_quoted(old[0])}"
        return _break(Cause.MESSAGE_INSERTED, at, detail, old[0], new[0])
    return _edited(Cause.MESSAGE_EDITED, at, gone[0], put[0])


def _kept_end(old: Sequence[Message], new: Sequence[Message]) -> int:
    """How many messages at the end of `old` are those that `new` begins with."""
    counts = range(min(len(old), len(new)), 0, -1)
    return next((n for n in counts if tuple(old[-n:]) == tuple(new[:n])), 0)


def _all_new(
    at: int, index: int, old: Sequence[Message], new: Sequence[Message]
) -> Divergence | None:
    """No message of `old` comes again: another task or a fork, unless the difference is told."""
    one, other = old[0], new[0]
    answered = _is_answered(new, len(old))
    cause = rewriting(one, other)
    replaced = len(new) > 1 and _answers_one_call(one, other)
    # Newest messages of branches differ in a date or an id as well: only an answer behind the
    # message tells, and comes with the next call.
    alone = not index and cause is not None and _loses_a_prompt(cause, one, other)
    if cause and (answered or replaced or alone):
        return Divergence(_edited(cause, at, one, other), True)
    if replaced and index:
        return Divergence(_edited(Cause.MESSAGE_EDITED, at, one, other), True)
    # A message alone asks for a summary; one that stands for others has something behind it.
    stands = len(new) > 1 and _is_summary(new[:1], old) and not _ASKS_FOR_IT.search(other.text)
    if stands and len(old) > (2 if index else 1):
        return Divergence(_summarised(at, old, new[:1]), not index)
    asked = one.role == other.role and one.role != "assistant"
    if asked and answered and len(old) == 1 and _is_grown(one.text, other.text):
        return Divergence(_edited(Cause.MESSAGE_EDITED, at, one, other), True)
    return _another(at, index, old, new)


def _another(
    at: int, index: int, old: Sequence[Message], new: Sequence[Message]
) -> Divergence | None:
    """Another task of the session; a fork, where it begins with what both share."""
    if index:
        return None
    detail = f"messages[{at}] ({_quoted(new[0])}) begins another conversation"
    return Divergence(_break(Cause.UNRELATED, at, detail, old[0], new[0]), True)


def _loses_a_prompt(cause: Cause, one: Message, other: Message) -> bool:
    """Whether two messages, nothing around which was seen before, are one long prompt.

    So they are if the text from their first difference on is long, and what is new in it no more
    than a time of day or a uuid. A date, a number or a shorter id names the task as often as not.
    """
    behind = min(len(one.text), len(other.text)) - common_prefix(one.text, other.text)
    if behind < SHARED_PROMPT or cause is Cause.UNKNOWN:
        return False
    if cause in (Cause.TIMESTAMP, Cause.RANDOM_ID):
        return only_clock_or_id(one.text, other.text)
    return True


def _is_answered(new: Sequence[Message], length: int) -> bool:
    """Whether `new` goes on with an answer where the old messages end.

    No request ended there in the new form, so the answer was given to the old one.
    """
    return len(new) > length and new[length].role == "assistant"


def _answers_one_call(one: Message, other: Message) -> bool:
    """Whether both are results of one tool call, as where old results are cleared."""
    return one.role == other.role == "tool" and one.call_id == other.call_id != ""


def _alike(one: str, other: str) -> bool:
    shorter, longer = sorted((one.strip(), other.strip()), key=len)
    return bool(shorter) and (shorter in longer or likeness(one, other) >= _ALIKE)


def _is_grown(one: str, other: str) -> bool:
    """Whether two messages are one: nearly equal, or one with something around it."""
    shorter = min(one.strip(), other.strip(), key=len)
    within = len(shorter) >= _MEANS_SOMETHING and shorter in one and shorter in other
    return within or likeness(one, other) >= _NEARLY_EQUAL


def _is_summary(put: Sequence[Message], gone: Sequence[Message]) -> bool:
    return any(_SUMMARY.search(m.text) for m in put) and not _SUMMARY.search(gone[0].text)


def _summarised(at: int, gone: Sequence[Message], put: Sequence[Message]) -> Break:
    detail = f"messages[{at}] ({_quoted(put[0])}) stands for {len(gone)} earlier messages"
    return _break(Cause.HISTORY_SUMMARISED, at, detail, gone[0], put[0])


def _edited(cause: Cause, at: int, one: Message, other: Message) -> Break:
    name, before, after = changed_field(one, other)
    expected, found = excerpts(before, after)
    short = excerpts(before, after, 40)
    detail = f"messages[{at}].{name}: {quoted(short.expected)} became {quoted(short.found)}"
    return Break(cause, at, detail, expected, found)


def _break(cause: Cause, at: int, detail: str, one: Message, other: Message) -> Break:
    return Break(cause, at, detail, *excerpts(shown(one), shown(other)))


def _quoted(message: Message) -> str:
    return quoted(one_line(shown(message), 50))
