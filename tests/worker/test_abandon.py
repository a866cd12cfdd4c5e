"""A call whose connection is gone: the decode worker tells whether it may read, or never does."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.worker.driver import TIMEOUT_S, Pair, stopped

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("settled")]

Tokens = Callable[[int], list[int]]


def prefilled(pair: Pair, prompt: list[int], request_id: str) -> dict[str, object]:
    handoff: dict[str, object] = pair.prefill_answer(prompt, request_id)["kv_transfer_params"]
    return handoff


def give_back(pair: Pair, request_id: str) -> bool:
    """What the router does; returns whether the decode worker may read."""
    reading = pair.abandon(request_id)
    if not reading:
        pair.release(request_id)
    return reading


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_comes_later_is_refused(idle: Pair, tokens: Tokens, stream: bool) -> None:
    prompt, name = tokens(100), f"late-{stream}"
    handoff, before = prefilled(idle, prompt, name), idle.state(idle.decode_worker)
    assert not idle.abandon(name)
    answer = idle.decode(prompt, handoff, name, stream=stream)
    assert (answer.status, answer.error["code"]) == (400, "call_given_up")
    after = idle.state(idle.decode_worker)
    assert after["prompt_tokens_computed"] == before["prompt_tokens_computed"]
    assert after["free_blocks"] == after["num_blocks"] - 1
    # The handoff is untouched, until the router releases it.
    assert idle.state(idle.prefill_worker)["open_leases"] == 1
    assert not give_back(idle, name)


def test_a_call_that_runs(idle: Pair, tokens: Tokens) -> None:
    prompt, name = tokens(100), "runs"
    with idle.streaming(prompt, prefilled(idle, prompt, name), name, max_tokens=800) as lines:
        next(lines)
        assert idle.abandon(name)
        # It goes on: whoever is still connected gets the rest.
        assert next(line for line in lines if line)


def test_a_call_that_ended(idle: Pair, tokens: Tokens) -> None:
    prompt, name = tokens(100), "ended"
    assert idle.decode(prompt, prefilled(idle, prompt, name), name).status == 200
    assert idle.abandon(name)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_left_before_its_call_was_seen(
    idle: Pair, tokens: Tokens, stream: bool
) -> None:
    prompt, name = tokens(600), f"left-{stream}"
    handoff = prefilled(idle, prompt, name)
    with (
        stopped(idle.pids["solver-0"]),
        pytest.raises(httpx.ReadTimeout),
        idle.streaming(
            prompt, handoff, name, timeout=httpx.Timeout(TIMEOUT_S, read=0.2), stream=stream
        ),
    ):
        pass
    give_back(idle, name)
    # By the reader, or by the release.
    idle.wait_until_idle(idle.prefill_worker)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call_first", [False, True])
def test_a_call_that_comes_at_the_same_moment_is_read_or_refused(
    idle: Pair, tokens: Tokens, stream: bool, call_first: bool
) -> None:
    prompt, name = tokens(600), f"same-{stream}-{call_first}"
    handoff = prefilled(idle, prompt, name)

    def call() -> str:
        with idle.streaming(prompt, handoff, name, max_tokens=4, stream=stream) as lines:
            return "\n".join(lines)

    def abandon() -> bool:
        return idle.abandon(name)

    with ThreadPoolExecutor(2) as pool:
        # Both lie in the worker's sockets when it goes on.
        with stopped(idle.pids["solver-0"]):
            running: dict[object, Future[Any]] = {}
            for ask in (call, abandon) if call_first else (abandon, call):
                running[ask] = pool.submit(ask)
                time.sleep(0.1)
        answered = "error" not in running[call].result()
        assert running[abandon].result() == answered
    if not answered:
        idle.release(name)


@pytest.mark.parametrize("delay_s", [0, 0.002, 0.005, 0.01, 0.02, 0.05])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_at_any_moment(
    idle: Pair, tokens: Tokens, stream: bool, delay_s: float
) -> None:
    prompt, name = tokens(600), f"moment-{stream}-{delay_s}"
    handoff = prefilled(idle, prompt, name)
    with (
        suppress(httpx.TimeoutException),
        idle.streaming(
            prompt, handoff, name, timeout=delay_s or 1e-6, max_tokens=300, stream=stream
        ),
    ):
        pass
    give_back(idle, name)
    idle.wait_until_idle(idle.prefill_worker)


def test_prefill_workers_read_nothing(idle: Pair) -> None:
    url = f"{idle.prefill_worker.url}/prefillshare/abandon"
    assert idle.http.post(url, json={"request_id": "any"}).status_code == 404
