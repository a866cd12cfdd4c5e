"""The session that is current in this thread or asyncio task."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._session import AsyncSession, Session

# A stack rather than reset tokens: tokens would have to live on the session, and one session may
# be entered in several threads and tasks at once.
_entered: ContextVar[tuple[Session | AsyncSession, ...]] = ContextVar(
    "prefillshare_session", default=()
)


def current_session() -> Session | AsyncSession | None:
    """Return the session of the innermost `with session:` around the caller, or None.

    Follows contextvars: asyncio tasks and LangGraph nodes started inside the block see it,
    plain threads do not unless they run in a copied context.
    """
    entered = _entered.get()
    return entered[-1] if entered else None


def enter(session: Session | AsyncSession) -> None:
    _entered.set((*_entered.get(), session))


def leave(session: Session | AsyncSession) -> None:
    """Undo the matching `enter`. Raises RuntimeError if the `with` blocks are not nested."""
    entered = _entered.get()
    if not entered or entered[-1] is not session:
        raise RuntimeError(f"session {session.id!r} is left where it is not the current one")
    _entered.set(entered[:-1])
