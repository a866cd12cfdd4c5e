"""Open `with session:` blocks, and which of them a call stands in.

Context variables alone get this wrong in generators: what one sets leaks to its reader whenever it
yields, and is gone where each step is run in a context of its own (Starlette reads synchronous
generators that way). So a block that is opened in a generator remembers that generator's frame, and
holds for calls only while the frame is on their stack.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from ._errors import SessionLostWarning

if TYPE_CHECKING:
    from ._async_session import AsyncSession
    from ._session import Session

_numbers = itertools.count()
_in_generators: dict[FrameType, tuple[Block, ...]] = {}
"""The open blocks of each generator, so that calls find them without context variables."""

_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_DRIVERS = {"contextlib", "_pytest", "pytest_asyncio"}
"""They run a generator to its `yield` as a way to write `__enter__`: the block is around that."""
_METHODS = {"__enter__", "__exit__", "__aenter__", "__aexit__"}


class Block:
    """One `with session:`, from its beginning to its end."""

    def __init__(
        self,
        session: Session | AsyncSession | None,
        generator: FrameType | None,
        run: Block | None,
        around: Block | None,
    ) -> None:
        self.session = session
        self.generator = generator
        """Where it was opened in one: its frame."""
        self.run = run
        """The block in which the run of the graph around this one began."""
        self.around = around
        self.place = _place() if generator is not None else None
        self.number = next(_numbers)
        self.is_over = False
        self.was_used = False
        self.was_told = False
        self.tag: Any = None
        """What the LangGraph integration marks the runs with that begin here."""
        if generator is not None:
            _in_generators[generator] = (*_in_generators.get(generator, ()), self)

    def end(self) -> None:
        """Let a generator's block hold nowhere any more.

        Others hold on where they have been handed down: for tasks that outlast them.
        """
        # Runs that began here may last, and are not to keep the generator's variables.
        frame, self.generator, self.around = self.generator, None, None
        if frame is None:
            return
        self.is_over = True
        left = tuple(block for block in _in_generators.get(frame, ()) if block is not self)
        if left:
            _in_generators[frame] = left
        else:
            _in_generators.pop(frame, None)


def generator_around(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the generator in which a `with` statement stands, or None.

    `frame` is that of `__enter__`'s caller.
    """
    while frame is not None:
        back = frame.f_back
        if _is_driver(frame) or frame.f_code.co_name in _METHODS:
            frame = back
        elif not frame.f_code.co_flags & _GENERATOR:
            return None
        elif back is not None and _is_driver(back):
            frame = back
        else:
            return frame
    return None


def innermost(entered: tuple[Block, ...], run: Block | None) -> Block | None:
    """Return the block in which the calling code stands.

    `entered` are those of its context variables, `run` is that in which its graph's run began:
    it holds for the whole run, whoever reads it, but for blocks that are opened inside.
    """
    on_stack, known = _known(entered)
    inside = [block for block in known if block.run is run]
    for block in inside:
        if (generator := block.generator) is None or generator in on_stack:
            return block
        if block.place != _place():
            # A thread or a task that was started somewhere: in the block, as far as one can see.
            if _is_sure(block, generator, inside):
                return block
            _warn_of(block)
            return run
        # Otherwise the generator is suspended, and this is its reader.
    return run


def latest(entered: tuple[Block, ...], session: object) -> Block | None:
    """Return the block of `session` that ends with the `with` statement which calls, or None."""
    on_stack, known = _known(entered)
    blocks = [block for block in known if block.session is session]
    own = (b for b in blocks if b.generator is None or b.generator in on_stack)
    # None where a generator's block is ended from outside, by an ExitStack for example.
    return next(own, blocks[0] if blocks else None)


def _known(entered: tuple[Block, ...]) -> tuple[set[FrameType], list[Block]]:
    """Return the generators on the stack, and all open blocks that there are, latest first."""
    on_stack = _generators_on_stack()
    known = {block for block in entered if not block.is_over}
    known |= {block for frame in on_stack for block in _in_generators.get(frame, ())}
    return on_stack, sorted(known, key=lambda block: -block.number)


def _is_sure(block: Block, generator: FrameType, others: list[Block]) -> bool:
    is_async = generator.f_code.co_flags & inspect.CO_ASYNC_GENERATOR
    if not is_async and generator.f_back is None:  # suspended
        return False
    outer = set(_outwards(block))
    return all(other in outer or other.generator is None for other in others)


def _outwards(block: Block | None) -> Iterator[Block]:
    while block is not None:
        yield block
        block = block.around


def _warn_of(block: Block) -> None:
    assert block.session is not None
    warnings.warn(
        f"a call does not carry session {block.session.id!r}: it may or may not belong to its "
        "`with` block, which stands in a generator that has yielded meanwhile, or beside another "
        "one's. Name the session in the call: client.with_options(session=...), "
        "bind(graph, session) or session_config(session)",
        SessionLostWarning,
        stacklevel=2,
    )


def _generators_on_stack() -> set[FrameType]:
    if not _in_generators:
        return set()
    frame: FrameType | None = sys._getframe(1)
    frames = set()
    while frame is not None:
        if frame in _in_generators:
            frames.add(frame)
        frame = frame.f_back
    return frames


def _place() -> tuple[int, object]:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident(), task


def _is_driver(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _DRIVERS
