"""The session that is current in this thread or asyncio task, and the role that calls."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING

from ._blocks import Block, generator_around, innermost, latest
from ._errors import SessionLostWarning

if TYPE_CHECKING:
    from ._async_session import AsyncSession
    from ._session import Session

# A stack rather than reset tokens: tokens would have to live on the session, and one session may
# be entered in several threads and tasks at once.
_entered: ContextVar[tuple[Block, ...]] = ContextVar("prefillshare_session", default=())
_role: ContextVar[str | None] = ContextVar("prefillshare_role", default=None)
_left: ContextVar[Block | None] = ContextVar("prefillshare_left", default=None)
"""The block that ended last here, if nothing was called in it."""

block_of_run: Callable[[], Block | None] = lambda: None  # noqa: E731
"""Returns the block in which the running graph began; set by the LangGraph integration."""


def current_session() -> Session | AsyncSession | None:
    """Return the session of the innermost `with session:` around the caller, or None.

    Follows contextvars: asyncio tasks and LangGraph nodes started inside the block see it,
    plain threads do not unless they run in a copied context. A block in a generator holds while
    the generator runs, not for who reads it.
    """
    block = current_block()
    return block.session if block is not None else None


def current_block() -> Block | None:
    """Return the block in which the caller stands, or None."""
    block = innermost(_entered.get(), block_of_run())
    if block is not None:
        block.was_used = True
    return block


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


def enter_block(session: Session | AsyncSession) -> None:
    """Enter `session` for the `with` statement whose `__enter__` calls this."""
    enter(session, generator_around(sys._getframe(2)))
    _left.set(None)


def leave_block(session: Session | AsyncSession) -> None:
    """Leave `session` for the `with` statement whose `__exit__` calls this."""
    block = leave(session)
    _left.set(block if block is not None and not block.was_used else None)


def is_behind_block() -> bool:
    """Return whether a block ended here in which nothing was called, whatever was called since."""
    return _left.get() is not None


def left_block() -> Block | None:
    """Return the block that ended last here, if nothing was called in it or of it yet.

    A graph's stream runs when it is read: one that is read now was made in there.
    """
    block = _left.get()
    return block if block is not None and not block.was_used else None


def enter(session: Session | AsyncSession | None, generator: FrameType | None = None) -> None:
    around = current_block()
    entered = (block for block in _entered.get() if not block.is_over)
    _entered.set((*entered, Block(session, generator, block_of_run(), around)))


def leave(session: Session | AsyncSession | None) -> Block | None:
    """Undo the latest `enter` of this session, wherever it stands, and return its block.

    Blocks need not be nested: generators are read in turns, and frameworks end a block in another
    context than the one they began it in. There nothing is left to undo.
    """
    entered = _entered.get()
    block = latest(entered, session)
    if block is not None:
        block.end()
        _entered.set(tuple(kept for kept in entered if kept is not block))
    return block


def warn_if_left() -> None:
    """Warn if a call here may be meant for the last block, which had none when it ended."""
    block = _left.get()
    if block is None or block.session is None:
        return
    _left.set(None)
    if block.was_told:
        return
    block.was_told = True  # Copies of this context know it too.
    warnings.warn(
        f"a call of a graph or chain has no session, and the block of {block.session.id!r} ended "
        "before the stream made in it was read. Of several streams only the first one keeps the "
        "session: read them inside the block, or make them with bind(graph, session).stream(...)",
        SessionLostWarning,
        stacklevel=2,
    )
