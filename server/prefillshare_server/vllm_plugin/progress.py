"""NIXL without its two surprises: a busy progress thread, and a worker pinned to one core."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

POLL_INTERVAL_US = 100_000
"""The progress thread sleeps in poll() on UCX's file descriptors, which wake it: this interval
bounds only what no descriptor announces."""


@contextmanager
def calm_nixl_agent() -> Iterator[None]:
    """Agents built inside this block have a sleeping progress thread and keep the affinity.

    NIXL's Python wrapper fixes the thread's poll timeout to 0, one whole core per agent. vLLM
    pins the thread that builds the agent to one core of each NUMA node on CPU, where an engine
    in one process computes in that very thread.
    """
    bindings: Any = importlib.import_module("nixl._api").nixlBind
    build_agent = bindings.nixlAgent

    def build_calm_agent(name: str, config: Any) -> Any:
        config.pthrDelay = POLL_INTERVAL_US
        return build_agent(name, config)

    affinity = os.sched_getaffinity(0)
    bindings.nixlAgent = build_calm_agent
    try:
        yield
    finally:
        bindings.nixlAgent = build_agent
        os.sched_setaffinity(0, affinity)
