"""How much of their prompts a program's calls shared, and what kept them from sharing more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prefillshare_prefix import Layout

from ._ledger import Account
from ._rendering import render
from ._request import Request

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class _Later:
    """A call that had something to share."""

    index: int
    chat: Request
    account: Account

    @property
    def shared(self) -> int:
        return min(self.account.shared_context, self.account.shareable)

    @property
    def lost(self) -> int:
        return self.account.shareable - self.shared


class Sharing:
    """A verdict on some chat calls."""

    def __init__(self, chats: Sequence[Request], layout: Layout) -> None:
        self._chats = chats
        self._layout = layout
        self._later = [
            _Later(index, chat, chat.account)
            for index, chat in enumerate(chats)
            if chat.account is not None and chat.account.shareable
        ]

    @property
    def possible(self) -> bool:
        return bool(self._later)

    def ratio(self, of: str = "shareable") -> float:
        if of not in ("shareable", "prompt"):
            raise ValueError(f"of is {of!r}; give 'shareable' or 'prompt'")
        if of == "prompt":
            shared = sum(call.account.shared for call in self._later)
            return shared / max(sum(call.account.prompt for call in self._later), 1)
        shared = sum(call.shared for call in self._later)
        return shared / max(sum(call.account.shareable for call in self._later), 1)

    def problem(self, min_ratio: float, of: str) -> str | None:
        """Why this is less than `min_ratio`; None if it is not."""
        ratio = self.ratio(of)
        if not any(call.account.session is not None for call in self._later):
            return self._nothing_to_share()
        if ratio >= min_ratio:
            return None
        what = "their prompts" if of == "prompt" else "what they could have shared"
        lines = [f"the calls shared {ratio:.1%} of {what}, less than {min_ratio:.1%}"]
        losing = sorted((call for call in self._later if call.lost), key=lambda call: -call.lost)
        for call in losing[:_SHOWN]:
            lines += self._explained(call)
        if len(losing) > _SHOWN:
            lines.append(f"and {len(losing) - _SHOWN} more calls that shared less than they could")
        if not losing:
            lines.append("nothing was read twice: the rest is new in each call, or the role's own")
        return "\n".join(lines)

    def _nothing_to_share(self) -> str:
        answered = [chat for chat in self._chats if chat.account is not None]
        named = [chat.session for chat in answered if chat.session is not None]
        problem = (
            f"no call goes on from another one of its session: {len(answered)} calls were "
            f"answered, {len(answered) - len(named)} of them without a session, the others in "
            f"{len(set(named))} sessions"
        )
        fix = "\n  fix: give all calls of a conversation the same session (X-Session-ID)"
        return problem + (fix if len(answered) > 1 else "")

    def _explained(self, call: _Later) -> Iterator[str]:
        account = call.account
        nearest = self._nearest(call)
        with_call = "" if nearest is None else f" with call {nearest}"
        yield (
            f"call {call.index} (role {account.role!r}, session {account.session!r}) shared "
            f"{call.shared} of {account.shareable} context tokens{with_call}"
        )
        if account.session is None:
            yield "  it repeats an earlier call and carries no session"
            yield "  fix: send it in the session of that call (X-Session-ID)"
        elif account.broken is not None:
            why = account.broken.why
            yield f"  {why.cause}: {why.words}"
            yield f"  {why.detail}"
            yield f"  before: {why.expected}"
            yield f"  now:    {why.found}"
            yield f"  fix: {why.fix}"
        elif call.chat.header("x-prefillshare-mode") is not None:
            yield "  X-PrefillShare-Mode: isolate keeps the roles apart"
        elif self._layout == "model":
            yield "  layout 'model' shares nothing between roles"
        else:
            yield "  the earlier call was made with X-PrefillShare-Mode: isolate"

    def _nearest(self, call: _Later) -> int | None:
        """The earlier call whose context has most of this one's beginning; the latest of them."""
        session = call.account.session
        mine = self._context(call.chat)
        earlier = [
            (_common(self._context(chat), mine), index)
            for index, chat in enumerate(self._chats[: call.index])
            if chat.account is not None and session in (None, chat.account.session)
        ]
        return max(earlier)[1] if earlier else None

    def _context(self, chat: Request) -> list[str]:
        return render(chat.body["messages"]).counted().context


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
