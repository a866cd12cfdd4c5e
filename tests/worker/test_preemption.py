"""A decode worker that runs out of KV blocks ends a request with a mark; it never recomputes."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.reference import base_cache_logprobs
from tests.worker.driver import Answer, Pair

pytestmark = [pytest.mark.engine, pytest.mark.exactness]

LONG = 300
"""Tokens; with its prompt more than half of the worker's blocks."""


@pytest.fixture(scope="module")
def answers(pair: Pair) -> list[tuple[list[int], Answer]]:
    """Three long answers at once, which need more than the worker's 40 blocks."""
    # On a busy machine one answer may be over before the next one begins.
    for _ in range(5):
        found = at_once(pair)
        if any(answer.choice["finish_reason"] == "abort" for _, answer in found):
            break
    return found


def at_once(pair: Pair) -> list[tuple[list[int], Answer]]:
    prompts = [[start + index % 97 for index in range(310)] for start in (0, 50, 100)]
    # Before any answer begins: on a busy machine one could end before another is prefilled.
    handoffs = [pair.prefill(prompt) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(partial(pair.decode, max_tokens=LONG), prompts, handoffs)
        return list(zip(prompts, found, strict=True))


def preempted(answers: list[tuple[list[int], Answer]]) -> list[tuple[list[int], Answer]]:
    found = [(p, a) for p, a in answers if a.choice["finish_reason"] == "abort"]
    assert found, "the three answers fit: the test needs fewer blocks"
    return found


def test_the_victim_is_marked(pair: Pair, answers: list[tuple[list[int], Answer]]) -> None:
    for _, answer in preempted(answers):
        assert answer.choice["stop_reason"] == "prefillshare:preempted"
        assert len(answer.token_ids) < LONG
        account = pair.account(answer)
        assert account["event"] == "preempted"
        assert account["prompt_tokens_computed"] == 1


def test_the_others_run_to_their_end(answers: list[tuple[list[int], Answer]]) -> None:
    finished = [answer for _, answer in answers if answer.choice["finish_reason"] == "length"]
    assert finished
    assert all(len(answer.token_ids) == LONG for answer in finished)


def test_every_delivered_token_is_exact(
    pair: Pair, answers: list[tuple[list[int], Answer]]
) -> None:
    for prompt, answer in answers:
        expected = base_cache_logprobs(pair.base_dir, pair.decoder_dir, prompt, answer.token_ids)
        assert answer.logprobs == pytest.approx(expected, abs=1e-3)


def test_the_victim_can_be_resumed_exactly(
    pair: Pair, answers: list[tuple[list[int], Answer]]
) -> None:
    prompt, answer = preempted(answers)[0]
    begun = answer.token_ids
    resumed = pair.resume(prompt, begun, max_tokens=LONG)
    whole = base_cache_logprobs(pair.base_dir, pair.decoder_dir, prompt, resumed.token_ids)
    assert len(resumed.token_ids) == LONG
    assert resumed.logprobs[len(begun) :] == pytest.approx(whole[len(begun) :], abs=1e-3)
