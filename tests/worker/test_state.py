"""Live numbers of a worker: what it holds, and sums over all that ended."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.worker.driver import BLOCK, Pair

pytestmark = pytest.mark.engine

Tokens = Callable[[int], list[int]]

SUMS = (
    "base_tokens_received",
    "base_tokens_reused",
    "prompt_tokens_computed",
    "generated_tokens_recomputed",
    "handoff_bytes",
)


def sums(state: dict[str, Any], since: dict[str, Any]) -> dict[str, int]:
    return {name: state[name] - since[name] for name in SUMS}


def test_an_idle_worker_has_all_blocks_but_vllms_own(idle: Pair) -> None:
    for worker, blocks in ((idle.prefill_worker, 256), (idle.decode_worker, 40)):
        state = idle.state(worker)
        assert (state["num_blocks"], state["free_blocks"]) == (blocks, blocks - 1)
        assert set(state["events"]) == {
            "preempted",
            "kv_load_failed",
            "lease_expired",
            "handoff_timeout",
        }


def test_the_cached_blocks_are_those_that_another_prompt_may_find(
    idle: Pair, tokens: Tokens
) -> None:
    worker = idle.prefill_worker
    # Prompts of whole blocks, until each block of the worker holds a part of one.
    for _ in range(-(-255 // 28)):
        idle.fill(tokens(28 * BLOCK))
    assert idle.state(worker)["cached_blocks"] == 255
    # Takes the place of four, and its last block is not whole.
    idle.fill(tokens(3 * BLOCK + 5))
    state = idle.state(worker)
    assert (state["cached_blocks"], state["free_blocks"]) == (254, 255)
    assert state["bytes_per_block"] == worker.block_bytes


def test_a_request_that_runs(idle: Pair, tokens: Tokens) -> None:
    for _ in range(5):
        prompt = tokens(100)
        with idle.streaming(prompt, idle.prefill(prompt), max_tokens=800) as lines:
            next(lines)
            state = idle.state(idle.decode_worker)
        # On a busy machine all of it may have been on its way by then.
        if state["running"]:
            break
    assert (state["running"], state["waiting"]) == (1, 0)
    assert state["free_blocks"] <= 39 - 4
    idle.wait_until_idle(idle.decode_worker)


def test_the_sums_of_a_decode_worker(idle: Pair, tokens: Tokens) -> None:
    prompt, before = tokens(70), idle.state(idle.decode_worker)
    begun = idle.call(prompt).token_ids
    idle.resume(prompt, begun[:5])
    # Aborted, and counted all the same.
    longer = prompt + tokens(10)
    with idle.streaming(longer, idle.prefill(longer), max_tokens=800) as lines:
        next(lines)
    idle.wait_until_idle(idle.decode_worker)
    assert sums(idle.state(idle.decode_worker), before) == {
        "base_tokens_received": 69 + (69 - 64) + (79 - 64),
        "base_tokens_reused": 64 + 64,
        "prompt_tokens_computed": 3,
        "generated_tokens_recomputed": 5,
        "handoff_bytes": (3 + 1 + 1) * idle.decode_worker.block_bytes,
    }


def test_the_sums_of_a_prefill_worker(idle: Pair, tokens: Tokens) -> None:
    prompt, before = tokens(70), idle.state(idle.prefill_worker)
    idle.prefill_answer(prompt)
    idle.prefill_answer(prompt + tokens(30))
    found = sums(idle.state(idle.prefill_worker), before)
    assert found["prompt_tokens_computed"] == 70 + 30 + 70 % BLOCK
    assert found["base_tokens_reused"] == 2 * BLOCK
