"""An event loop whose time jumps over every wait, so that a test with timeouts takes no time.

Sockets are real: what is written to one on this machine can be read from the other end at once, so
a loop with nothing to read and nothing ready only waits for its next timer. Time stands still while
code runs; a slow machine never makes a timeout.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

_FAR_S = 0.25
"""A jump further than this could set off a timeout, and is not made on a hunch. Nor are short ones
that together go further."""
_HUNCH_S = 0.001
"""Real seconds to wait for sockets before such a jump."""

T = TypeVar("T")


class Stuck(RuntimeError):
    """Everything waits, and nothing will ever happen."""


class _Selector(selectors.DefaultSelector):
    """Gives what is ready; with nothing ready it puts the loop's time on instead of waiting."""

    jump: Callable[[float], None]
    threads: set[Any]
    jumped_s = 0.0
    """Since something could be read, or real time was spent on waiting for it."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            self.jumped_s = 0.0
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self.threads:
            return super().select(timeout)
        if timeout is None:
            ready = super().select(1)
            if not ready:
                raise Stuck("no timer and nothing to read")
            return ready
        self.jumped_s += timeout
        if self.jumped_s > _FAR_S:
            self.jumped_s = 0.0
            if ready := super().select(_HUNCH_S):
                return ready
        self.jump(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its `time()` begins at 0. Work in threads takes real time and none of the loop's."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = _Selector()
        selector.threads = set()
        selector.jump = self._jump
        self._threads: set[Any] = selector.threads
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def _jump(self, seconds: float) -> None:
        self._now += seconds

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        running = super().run_in_executor(executor, func, *args)
        self._threads.add(running)
        running.add_done_callback(self._threads.discard)
        return running


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a loop of its own; raises Stuck if it can never end.

    Raises AssertionError for an exception that nobody waited for.
    """
    unhandled: list[Mapping[str, Any]] = []
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        result = runner.run(main)
    assert not unhandled, f"exceptions nobody waited for: {unhandled}"
    return result
