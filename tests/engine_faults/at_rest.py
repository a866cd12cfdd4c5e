"""What the tests of this folder read from a running cluster."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from tests.served import Served

T = TypeVar("T")
SETTLE_S = 60
"""Half of a lease: what is left to end by itself takes longer."""

WAIT_S = 120


def state(served: Served, worker_id: str) -> dict[str, Any]:
    """Live numbers of one worker."""
    response = httpx.get(f"{served.worker(worker_id).url}/prefillshare/state", timeout=60)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def in_hand(served: Served) -> dict[str, dict[str, int]]:
    """What is not at rest, by worker: calls, reservations, leases, requests, blocks in use.

    Nor is a worker at rest that gets no calls.
    """
    listed = httpx.get(f"{served.url}/v1/workers", timeout=60).json()
    found = {}
    for worker in listed["data"]:
        live = state(served, worker["id"])
        counts = {key: worker[key] for key in ("in_flight", "reserved_blocks")}
        counts |= {key: live[key] for key in ("open_leases", "running", "waiting")}
        # vLLM keeps one block for itself.
        counts["blocks"] = live["num_blocks"] - 1 - live["free_blocks"]
        counts["down"] = int(worker["state"] != "up")
        if busy := {key: count for key, count in counts.items() if count}:
            found[worker["id"]] = busy
    return found


def assert_at_rest(served: Served, within_s: float = SETTLE_S) -> None:
    """Nothing is reserved, leased, running, waiting or in use any more."""
    deadline = time.monotonic() + within_s
    while left := in_hand(served):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def until(condition: Callable[[], T | None]) -> T:
    """Wait until `condition` gives something true; returns it."""
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
    return found
