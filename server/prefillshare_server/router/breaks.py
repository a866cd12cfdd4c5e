"""Prefix breaks: whether a context goes on from its session's, and why it does not.

The ledger compares texts, so it knows when a context leaves what was kept. That may be a fork,
which is all right. The messages decide: `prefillshare_prefix` finds what was changed in them; and
where they do go on, the text of those in common must be what it was, or the template broke it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefillshare_prefix import Break, text_break
from prefillshare_prefix.messages import read_request
from prefillshare_prefix.rewriting import is_unwritten
from prefillshare_prefix.texts import common_prefix
from prefillshare_server.router.errors import RouterError, prefix_break
from prefillshare_server.router.ledger import Lost, Piece
from prefillshare_server.router.sessions import Session
from prefillshare_server.router.tally import Tally

HEADER = "X-PrefillShare-Break"
HEADER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """A context that does not go on from its session's: where, and why."""

    lost: Lost
    why: Break

    def report(self) -> dict[str, Any]:
        """The field `break` of an answer."""
        return {**self.lost._asdict(), **self.why.to_dict()}

    def error(self) -> RouterError:
        """The refusal of a caller who allows none."""
        where = f"after {self.lost.token_index} shared tokens"
        return prefix_break(where, self.why.detail, self.why.fix, {HEADER: self.header()})

    def header(self) -> str:
        """The value of X-PrefillShare-Break: ASCII, so a long detail is cut short."""
        told = self.report()
        fields = {name: told[name] for name in _IN_HEADER}
        value = json.dumps(fields)
        while len(value) > HEADER_BYTES:
            # A character that is not ASCII takes 6 bytes or 12.
            cut = max((len(value) - HEADER_BYTES) // 12, 2)
            fields["detail"] = fields["detail"][:-cut] + "…"
            value = json.dumps(fields)
        return value


_IN_HEADER = ("cause", "message_index", "token_index", "lost_tokens", "detail", "fix")


def said(body: Mapping[str, Any], *, whole: bool) -> tuple[int, ...]:
    """A number for each message of a request's context, equal for equal beginnings.

    With `whole` the leading system message and tools count as its first, for layouts that render
    them first.
    """
    asked = read_request(body)
    numbers: list[int] = []
    for message in ([(asked.system, asked.tools)] if whole else []) + list(asked.context):
        numbers.append(hash((numbers[-1] if numbers else 0, message)))
    return tuple(numbers)


def judged(
    session: Session, body: Mapping[str, Any], text: str, *, whole: bool, render: Render
) -> Break | None:
    """Why a context that the ledger says leaves the kept ones is no fork of them.

    `text` is the context as rendered, and `render` gives the text of a request's first messages,
    of as many of its context as said.
    """
    if (changed := session.history.compare(body)) is not None:
        head = len(read_request(body).system)
        kept_texts = ((len(end.said) - whole, end.context()) for end in session.ledger.contexts())
        return None if is_unwritten(changed, head, text, kept_texts) else changed
    numbers = said(body, whole=whole)
    kept = max(session.ledger.contexts(), key=lambda end: _common(end.said, numbers), default=None)
    before = kept.context() if kept is not None else None
    if kept is None or before is None:
        return None
    shared = _common(kept.said, numbers)
    if shared == len(kept.said):
        expected = len(before)
    else:
        expected = common_prefix(before, render(shared - whole)) if shared > whole else 0
    if common_prefix(before, text) >= expected:
        return None
    return text_break(before[:expected], text)


Render = Callable[[int], str]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def keep(session: Session, body: Mapping[str, Any], end: Piece | None, *, whole: bool) -> None:
    """Remember the messages of a context that the ledger keeps at `end`."""
    session.grown = True
    session.history.keep(body)
    if end is not None:
        end.said = said(body, whole=whole)


def answered(tally: Tally) -> dict[str, Any]:
    """A generated answer as the message that clients send back."""
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in tally.tool_calls
    ]
    return {"role": "assistant", "content": tally.content, "tool_calls": calls}
