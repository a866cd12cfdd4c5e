"""Workers that wait use next to no CPU, and what they wait for can fail."""

import time
from collections.abc import Callable

import pytest

from tests.worker.driver import Pair, family

pytestmark = pytest.mark.engine

Tokens = Callable[[int], list[int]]

WINDOW_S = 3.0
CORE_SHARE = 0.05


def core_shares(pids: dict[str, int], window_s: float = WINDOW_S) -> dict[str, float]:
    """Cores that each worker's processes use on average over the next seconds."""

    def used() -> dict[str, float]:
        return {
            name: sum(sum(process.cpu_times()[:2]) for process in family(pid))
            for name, pid in pids.items()
        }

    before, started = used(), time.monotonic()
    time.sleep(window_s)
    elapsed = time.monotonic() - started
    return {name: (after - before[name]) / elapsed for name, after in used().items()}


def assert_no_core_is_used(pids: dict[str, int]) -> None:
    """In one of three windows: what a worker still does about a call is no waiting."""
    shares: list[dict[str, float]] = []
    while not shares or max(shares[-1].values()) >= CORE_SHARE:
        assert len(shares) < 3, shares
        shares.append(core_shares(pids))


def test_idle_workers_use_no_core(pair: Pair, tokens: Tokens) -> None:
    pair.call(tokens(100))
    assert_no_core_is_used(pair.pids)


def test_a_prefill_worker_with_an_open_lease_uses_no_core(pair: Pair, tokens: Tokens) -> None:
    prompt = tokens(100)
    handoff = pair.prefill(prompt)
    time.sleep(1)
    assert_no_core_is_used(pair.pids)
    # The lease was open all the time, and an idle pair serves the reader at once.
    assert pair.account(pair.decode(prompt, handoff))["base_tokens_received"] == 99
