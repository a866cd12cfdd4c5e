"""The router ends a call at the prefill worker, whatever has become of the call there."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.worker.driver import IDLE_S, Pair

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("settled")]

Tokens = Callable[[int], list[int]]


def test_an_open_lease(idle: Pair, tokens: Tokens) -> None:
    idle.prefill_answer(tokens(100), "open")
    state = idle.state(idle.prefill_worker)
    assert state["open_leases"] == 1
    assert state["free_blocks"] == state["num_blocks"] - 1 - 4
    idle.release("open")


def test_twice(idle: Pair, tokens: Tokens) -> None:
    idle.prefill_answer(tokens(100), "twice")
    idle.release("twice")
    idle.release("twice")


def test_before_the_prefill(idle: Pair, tokens: Tokens) -> None:
    idle.release("early")
    answer = idle.prefill_answer(tokens(100), "early")
    assert answer["kv_transfer_params"] is None


def test_a_prefill_that_waits(idle: Pair, tokens: Tokens) -> None:
    # Ten prompts of 29 blocks each; the worker has 255 to give, and eight leases hold 232.
    with ThreadPoolExecutor(10) as pool:
        running = {
            name: pool.submit(idle.prefill_answer, tokens(900), name)
            for name in (f"many-{index}" for index in range(10))
        }
        deadline = time.monotonic() + IDLE_S
        while True:
            waiting = [name for name, future in running.items() if not future.done()]
            state = idle.state(idle.prefill_worker)
            # Until it has them all, a release would come before the prefill.
            if len(waiting) == state["running"] + state["waiting"] == 2:
                break
            assert time.monotonic() < deadline, state
            time.sleep(0.02)
        assert state["open_leases"] == 8
        for name in waiting:
            idle.release(name)
        # Whoever waits for the answer of an aborted prefill is not left waiting.
        ends = [running[name].result(timeout=IDLE_S)["choices"][0] for name in waiting]
        assert [end["finish_reason"] for end in ends] == ["abort", "abort"]
        for name in running:
            idle.release(name)


@pytest.mark.parametrize("delay_s", [0, 0.005, 0.01, 0.02, 0.05, 0.1])
def test_a_prefill_under_way(idle: Pair, tokens: Tokens, delay_s: float) -> None:
    name = f"moment-{delay_s}"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(idle.prefill_answer, tokens(1000), name)
        time.sleep(delay_s)
        idle.release(name)
        running.result(timeout=IDLE_S)


def test_only_the_named_call(idle: Pair, tokens: Tokens) -> None:
    prompt = tokens(100)
    handoff = idle.prefill_answer(prompt, "kept")["kv_transfer_params"]
    idle.prefill_answer(tokens(100), "kept-not")
    idle.release("kept-not")
    idle.release("kep")
    assert idle.decode(prompt, handoff).status == 200


def test_after_the_read(idle: Pair, tokens: Tokens) -> None:
    prompt = tokens(100)
    handoff = idle.prefill_answer(prompt, "read")["kv_transfer_params"]
    assert idle.decode(prompt, handoff).status == 200
    idle.release("read")


def test_a_read_that_is_reported_after_the_release(idle: Pair, tokens: Tokens) -> None:
    prompt = tokens(100)
    handoff = idle.prefill_answer(prompt, "late")["kv_transfer_params"]
    idle.release("late")
    idle.wait_until_idle(idle.prefill_worker)
    # The blocks are still there by luck; what counts is that the report does no harm.
    assert idle.decode(prompt, handoff).status == 200
    assert idle.call(prompt).status == 200


def test_a_waiting_prefill_worker_is_woken(idle: Pair, tokens: Tokens) -> None:
    idle.prefill_answer(tokens(100), "asleep")
    # By now it looks for news only ten times a second; test_rules.py has how it is woken.
    time.sleep(1)
    idle.release("asleep")
    idle.wait_until_idle(idle.prefill_worker)


def test_decode_workers_have_nothing_to_release(idle: Pair) -> None:
    response = idle.http.post(
        f"{idle.decode_worker.url}/prefillshare/release", json={"request_id": "any"}
    )
    assert response.status_code == 404
