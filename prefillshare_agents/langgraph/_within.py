"""Streams that keep the session of the place where they were made.

A generator runs where it is consumed, and a `with session:` block may have ended by then. So the
session is looked up when the stream is made, and entered anew around every step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from .. import AsyncSession, Session, _context

Item = TypeVar("Item")
AnySession = Session | AsyncSession


@contextmanager
def entered(session: AnySession | None, role: str | None = None) -> Iterator[None]:
    """Make `session` the current one for the block, in synchronous and asynchronous code.

    Sessions count the calls of the block under `role`.
    """
    with _context.calling_as(role) if role else nullcontext():
        if session is None:
            yield
            return
        _context.enter(session)
        try:
            yield
        finally:
            _context.leave(session)


def within(
    session: AnySession | None, items: Iterator[Item], role: str | None = None
) -> Iterator[Item]:
    """Yield `items`, each of them made inside `session`, by calls that count under `role`."""
    done = object()
    try:
        while True:
            with entered(session, role):
                item: Any = next(items, done)
            if item is done:
                return
            yield item
    finally:
        with entered(session):
            close = getattr(items, "close", None)
            if close is not None:
                close()


async def awithin(
    session: AnySession | None, items: AsyncIterator[Item], role: str | None = None
) -> AsyncIterator[Item]:
    """Async twin of `within`."""
    done = object()
    try:
        while True:
            with entered(session, role):
                item: Any = await anext(items, done)
            if item is done:
                return
            yield item
    finally:
        with entered(session):
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()


async def awaited(session: AnySession | None, made: Awaitable[Item]) -> Item:
    """Await `made` inside `session`."""
    with entered(session):
        return await made
