"""An engine that only waits must not use a core.

vLLM's engine loop steps every millisecond while a lease is open on a prefill worker or a pull is
pending on a decode worker (`EngineCoreProc._process_engine_step`): 10-20 % of a core with nothing
to compute. Here the wait grows with the time nothing ran, and a new request ends it at once.
"""

import time
from typing import Any

FIRST_WAIT_S = 0.001
LONGEST_WAIT_S = 0.1
"""Also the longest delay before the engine notices a finished pull or an expired lease."""

WAIT_PER_IDLE_TIME = 0.25
"""A pull that takes t seconds is noticed at most t/4 late."""


class CalmWait:
    """Decides how long an engine loop that has nothing to compute waits before the next step."""

    def __init__(self) -> None:
        self._idle_since: float | None = None

    def ran(self) -> None:
        """The model ran or there is nothing to wait for: the next wait starts short again."""
        self._idle_since = None

    def next_wait(self, now: float) -> float:
        """Seconds to wait, in proportion to how long nothing ran."""
        if self._idle_since is None:
            self._idle_since = now
        idle = now - self._idle_since
        return min(LONGEST_WAIT_S, max(FIRST_WAIT_S, idle * WAIT_PER_IDLE_TIME))


def install_calm_engine_loop() -> None:
    """Wrap the engine's step so that it waits on its input queue. Idempotent."""
    from vllm.v1.engine.core import EngineCoreProc

    if getattr(EngineCoreProc, "_prefillshare_calm", False):
        return
    EngineCoreProc._prefillshare_calm = True
    original = EngineCoreProc._process_engine_step

    def step_then_wait(engine: Any) -> bool:
        model_executed: bool = original(engine)
        calm = engine.__dict__.setdefault("_prefillshare_wait", CalmWait())
        if model_executed or not engine.scheduler.has_requests():
            calm.ran()
        else:
            _wait_for_input(engine.input_queue, calm.next_wait(time.monotonic()))
        return model_executed

    EngineCoreProc._process_engine_step = step_then_wait


def _wait_for_input(input_queue: Any, timeout: float) -> None:
    """Return when the queue holds something, at the latest after `timeout` seconds."""
    with input_queue.not_empty:
        if not input_queue._qsize():
            input_queue.not_empty.wait(timeout)
