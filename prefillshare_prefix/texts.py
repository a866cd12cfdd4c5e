"""Two texts that should be equal: where they part, and whether only a clock or a blank differs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar
from unicodedata import normalize

from prefillshare_prefix.causes import Break, Cause

Text = TypeVar("Text", str, bytes)

EXCERPT_CHARS = 80
_BEFORE_DIFFERENCE = 30
# Enough to see a whole date, id or tag around a difference.
_AROUND = 64
# Two texts with more than this between their differences are not one text with another date.
_MASKED_CHARS = 200_000
_LONG = 400
_WORDS_IN_COMMON = 0.2

_THOUGHT_TAG = re.compile(r"<(/?)(think|thinking|thought|reasoning)>")
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|"
    r"Sep(?:t(?:ember)?)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_TIME = re.compile(
    r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
    r"|\b\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?"
    r"|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b|\b\d{4}/\d{2}/\d{2}\b"
    rf"|\b\d{{1,2}}(?:st|nd|rd|th)?\.? {_MONTH}\.?(?:,? \d{{4}})?\b"
    rf"|\b{_MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?\b|\b{_MONTH} \d{{4}}\b"
    r"|\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"
    r"|\b1\d{9}(?:\.\d+)?\b|\b1\d{12}\b"
)
_OF_DAY = re.compile(r"(?<![\d:.])\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?")
_UUID_FORM = r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"
_UUID = re.compile(_UUID_FORM)
_ID = re.compile(
    rf"{_UUID_FORM}"
    r"|\b(?:call|chatcmpl-tool|toolu|run|msg|req)[_-][\w-]{6,}"
    r"|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b"
)
_EMPTY_BRACKETS = re.compile(r"\[\s*\x00\s*\]|\(\s*\x00\s*\)|\x00")


def _without_thoughts(text: str) -> str:
    kept, start = [], 0
    opened: re.Match[str] | None = None
    # One pass: a pattern over both tags takes quadratic time where many are left open.
    for tag in _THOUGHT_TAG.finditer(text):
        if not tag[1]:
            opened = opened or tag
        elif opened and opened[2] == tag[2]:
            kept.append(text[start : opened.start()])
            start, opened = tag.end(), None
    kept.append(text[start:].lstrip() if kept else text)
    return "".join(kept).strip()


def _without_blanks(text: str) -> str:
    return " ".join(text.split())


_MASKS: dict[Cause, Callable[[str], str]] = {
    Cause.TIMESTAMP: lambda text: _TIME.sub("\0", text),
    Cause.RANDOM_ID: lambda text: _ID.sub("\1", text),
    Cause.WHITESPACE: _without_blanks,
    Cause.THINK_STRIPPED: _without_thoughts,
}


def same_but_for(before: str, after: str) -> Cause | None:
    """The cause that explains all of the difference between two texts; None when none does.

    Takes time in proportion to the texts' lengths.
    """
    return _explained(*_middles(before, after)) or (
        Cause.ARGUMENTS_REWRITTEN if same_json(before, after) else None
    )


def only_clock_or_id(before: str, after: str) -> bool:
    """Whether two texts differ in nothing but a time of day, with its date if any, and in uuids."""
    one, other = _middles(before, after)
    if len(one) + len(other) > _MASKED_CHARS:
        return False
    one, other = _UUID.sub("\1", one), _UUID.sub("\1", other)
    if one == other:
        return before != after
    if _TIME.sub("\0", one) != _TIME.sub("\0", other):
        return False
    clocks = _OF_DAY.findall(one), _OF_DAY.findall(other)
    return len(clocks[0]) == len(clocks[1]) and clocks[0] != clocks[1]


def _middles(before: str, after: str) -> tuple[str, str]:
    """Both texts from a little before their first difference to a little behind their last."""
    start = common_prefix(before, after)
    limit = min(len(before), len(after)) - start
    end = min(common_prefix(before[start:][::-1], after[start:][::-1]), limit)
    first, last = max(start - _AROUND, 0), max(end - _AROUND, 0)
    return before[first : len(before) - last], after[first : len(after) - last]


def _explained(before: str, after: str) -> Cause | None:
    if len(before) + len(after) > _MASKED_CHARS:
        return None if _without_blanks(before) != _without_blanks(after) else Cause.WHITESPACE
    if _are_others(before, after):
        return None
    for cause, mask in _MASKS.items():
        if mask(before) == mask(after):
            return cause
    if before.strip() and after.strip() and _no_times(before) == _no_times(after) != "":
        return Cause.TIMESTAMP
    if _masked(before, _MASKS) != _masked(after, _MASKS):
        return None
    # Several at once: the first without which the texts still differ.
    for cause in _MASKS:
        others = [other for other in _MASKS if other is not cause]
        if _masked(before, others) != _masked(after, others):
            return cause
    return Cause.UNKNOWN


def _are_others(before: str, after: str) -> bool:
    """Whether long texts have so few words in common that no pattern need be tried."""
    if min(len(before), len(after)) < _LONG:
        return False
    one, other = set(before.split()), set(after.split())
    return len(one & other) < _WORDS_IN_COMMON * min(len(one), len(other))


def _masked(text: str, causes: Sequence[Cause] | dict[Cause, Callable[[str], str]]) -> str:
    for cause in causes:
        text = _MASKS[cause](text)
    return text


def _no_times(text: str) -> str:
    """The text as if it never had a time in it: where one was only added or only removed."""
    return _without_blanks(_EMPTY_BRACKETS.sub("", _TIME.sub("\0", text)))


def same_json(before: str, after: str) -> bool:
    """Whether both are JSON objects or lists that say the same."""
    if before[:1].strip() not in ("", "{", "[") or after[:1].strip() not in ("", "{", "["):
        return False
    one, other = _parsed(before), _parsed(after)
    return one is not None and one == other


def _parsed(text: str) -> str | None:
    try:
        value = json.loads(text)
        # As text again: in Python 1 equals true.
        return json.dumps(value, sort_keys=True) if isinstance(value, (dict, list)) else None
    except (ValueError, RecursionError):
        return None


def common_prefix(before: Text, after: Text) -> int:
    """How many leading characters, or bytes, two texts share."""
    low, high = 0, min(len(before), len(after))
    while low < high:
        middle = (low + high + 1) // 2
        if before.startswith(after[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def likeness(before: str, after: str) -> float:
    """Share of the longer text that is a common beginning or end: 0 to 1."""
    longer = max(len(before), len(after))
    if not longer:
        return 1.0
    start = common_prefix(before, after)
    end = common_prefix(before[start:][::-1], after[start:][::-1])
    return (start + end) / longer


class Excerpts(NamedTuple):
    """Both texts around their first difference, in one line and at most 80 characters each."""

    expected: str
    found: str


def excerpts(before: str, after: str, chars: int = EXCERPT_CHARS) -> Excerpts:
    """Cut both texts around their first difference; control characters are escaped."""
    at = common_prefix(before, after)
    lead = min(at, _BEFORE_DIFFERENCE, chars // 2)
    start = at - lead
    seen = [normalize("NFKC", text[start : start + chars]) for text in (before, after)]
    # é in one letter and in two, for example. The last letter may have been cut.
    alike = at < min(len(before), len(after)) and common_prefix(*seen) + 1 >= min(map(len, seen))
    return Excerpts(_cut(before, start, chars, plain=alike), _cut(after, start, chars, plain=alike))


def quoted(text: str) -> str:
    """A text in quotes that was escaped already."""
    mark = '"' if "'" in text and '"' not in text else "'"
    return f"{mark}{text}{mark}"


def _cut(text: str, start: int, chars: int, *, plain: bool = False) -> str:
    """One line of `text`; with `plain` all that is not ASCII is escaped."""
    shown = "…" if start else ""
    for position in range(start, len(text)):
        letter = text[position]
        as_it_is = letter.isascii() if plain else True
        piece = letter if letter.isprintable() and as_it_is else ascii(letter)[1:-1]
        rest = position + 1 < len(text)
        if len(shown) + len(piece) + rest > chars:
            return shown + "…"
        shown += piece
    return shown


def one_line(text: str, chars: int = 40) -> str:
    """The beginning of a text in one line."""
    return _cut(text, 0, chars)


def text_break(before: str, after: str) -> Break:
    """Why rendered text `after` does not begin with `before`, although its messages go on from it.

    Blames a clock in the template, thoughts it drops, or blanks it trims where that explains all
    of it, the template otherwise.
    """
    at = common_prefix(before, after)
    start, stop = max(at - _AROUND, 0), at + _MASKED_CHARS // 4
    cause = Cause.TEMPLATE
    for candidate in (Cause.TIMESTAMP, Cause.WHITESPACE, Cause.THINK_STRIPPED):
        mask = _MASKS[candidate]
        if mask(after[start:stop]).startswith(mask(before[start:stop])):
            cause = candidate
            break
    expected, found = excerpts(before, after)
    changed = f"{quoted(expected)} became {quoted(found)}"
    detail = f"the rendered prompt differs at character {at:,}: {changed}"
    return Break(cause, None, detail, expected, found)
