"""The session that is current in this thread or asyncio task, and the role that calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._async_session import AsyncSession
    from ._session import Session

# A stack rather than reset tokens: tokens would have to live on the session, and one session may
# be entered in several threads and tasks at once.
_entered: ContextVar[tuple[Session | AsyncSession | None, ...]] = ContextVar(
    "prefillshare_session", default=()
)
_role: ContextVar[str | None] = ContextVar("prefillshare_role", default=None)


def current_session() -> Session | AsyncSession | None:
    """Return the session of the innermost `with session:` around the caller, or None.

    Follows contextvars: asyncio tasks and LangGraph nodes started inside the block see it,
    plain threads do not unless they run in a copied context.
    """
    entered = _entered.get()
    return entered[-1] if entered else None


def current_role() -> str | None:
    """Return the name under which a session counts the calls made here, or None: their model's."""
    return _role.get()


@contextmanager
def calling_as(role: str) -> Iterator[None]:
    """Let sessions count the calls of the block under `role`."""
    before = _role.get()
    _role.set(role)
    try:
        yield
    finally:
        _role.set(before)


@contextmanager
def no_session() -> Iterator[None]:
    """Let no session be current in the block."""
    enter(None)
    try:
        yield
    finally:
        leave(None)


def enter(session: Session | AsyncSession | None) -> None:
    _entered.set((*_entered.get(), session))


def leave(session: Session | AsyncSession | None) -> None:
    """Undo the latest `enter` of this session, wherever it stands.

    Blocks need not be nested: generators are read in turns, and frameworks end a block in another
    context than the one they began it in. There nothing is left to undo.
    """
    entered = _entered.get()
    for position in range(len(entered) - 1, -1, -1):
        if entered[position] is session:
            _entered.set(entered[:position] + entered[position + 1 :])
            return
