"""A decode worker never computes a prompt that the base did not: it says why instead."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.worker.driver import Pair

pytestmark = pytest.mark.engine

Tokens = Callable[[int], list[int]]


def changed(handoff: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The handoff with other values in our part of it."""
    return {**handoff, "prefillshare": {**handoff["prefillshare"], **fields}}


@pytest.fixture
def untouched(pair: Pair) -> Any:
    """The decode worker's engine computes nothing during the test."""
    before = pair.metric(pair.decode_worker, "vllm:prompt_tokens_total")
    yield
    assert pair.metric(pair.decode_worker, "vllm:prompt_tokens_total") == before


@pytest.mark.usefixtures("untouched")
class TestBeforeTheEngine:
    """Refused with an OpenAI error body, also when a stream was asked for."""

    def test_no_handoff(self, pair: Pair, tokens: Tokens) -> None:
        answer = pair.decode(tokens(50), None)
        assert (answer.status, answer.error["code"]) == (400, "base_kv_missing")
        assert answer.error["type"] == "invalid_request_error"
        assert "Send the request to the router" in answer.error["message"]

    def test_no_handoff_in_chat(self, pair: Pair, tokens: Tokens) -> None:
        answer = pair.chat(tokens(50), None)
        assert (answer.status, answer.error["code"]) == (400, "base_kv_missing")

    def test_a_stream_is_refused_by_its_status(self, pair: Pair, tokens: Tokens) -> None:
        status, (body,) = pair.stream_chat(tokens(50), None)
        assert (status, body["error"]["code"]) == (400, "base_kv_missing")

    def test_a_handoff_of_plain_vllm(self, pair: Pair, tokens: Tokens) -> None:
        prompt = tokens(50)
        handoff = pair.prefill(prompt)
        del handoff["prefillshare"]
        answer = pair.decode(prompt, handoff)
        assert (answer.status, answer.error["code"]) == (400, "base_kv_missing")

    def test_a_handoff_that_is_nonsense(self, pair: Pair, tokens: Tokens) -> None:
        prompt = tokens(50)
        handoff = {**pair.prefill(prompt), "remote_block_ids": "all of them"}
        answer = pair.decode(prompt, handoff)
        assert (answer.status, answer.error["code"]) == (400, "base_kv_missing")

    def test_another_base(self, pair: Pair, tokens: Tokens) -> None:
        prompt = tokens(50)
        handoff = changed(pair.prefill(prompt), base_fingerprint="0123456789abcdef")
        answer = pair.decode(prompt, handoff)
        assert (answer.status, answer.error["code"]) == (400, "base_kv_mismatch")
        assert "0123456789abcdef" in answer.error["message"]

    @pytest.mark.parametrize("left_s", [-1, 5])
    def test_a_lease_that_ended_or_is_about_to(
        self, pair: Pair, tokens: Tokens, left_s: float
    ) -> None:
        prompt = tokens(50)
        handoff = changed(pair.prefill(prompt), expires_at=time.time() + left_s)
        answer = pair.decode(prompt, handoff)
        assert (answer.status, answer.error["code"]) == (503, "lease_expired")

    def test_several_answers_of_one_handoff(self, pair: Pair, tokens: Tokens) -> None:
        prompt = tokens(50)
        answer = pair.decode(prompt, pair.prefill(prompt), n=2)
        assert (answer.status, answer.error["code"]) == (400, "one_answer_per_handoff")

    def test_logprobs_of_the_prompt(self, pair: Pair, tokens: Tokens) -> None:
        prompt = tokens(50)
        answer = pair.decode(prompt, pair.prefill(prompt), prompt_logprobs=1)
        assert (answer.status, answer.error["code"]) == (400, "prompt_logprobs_unsupported")


@pytest.mark.usefixtures("untouched")
class TestInTheEngine:
    """What only the scheduler can know, or what came another way than through chat/completions."""

    def test_other_tokens_than_the_base_processed(self, pair: Pair, tokens: Tokens) -> None:
        prompt = tokens(50)
        handoff = pair.prefill(prompt)
        prompt[10] += 1
        answer = pair.decode(prompt, handoff)
        assert answer.status == 400
        assert "prompt_mismatch" in answer.error["message"]

    def test_a_shorter_prompt_than_the_base_processed(self, pair: Pair, tokens: Tokens) -> None:
        prompt = tokens(50)
        answer = pair.decode(prompt[:-1], pair.prefill(prompt))
        assert answer.status == 400
        assert "prompt_mismatch" in answer.error["message"]

    def test_the_responses_endpoint(self, pair: Pair) -> None:
        response = pair.http.post(
            f"{pair.decode_worker.url}/v1/responses",
            json={"model": pair.decode_worker.model, "input": "hello", "max_output_tokens": 4},
        )
        assert response.status_code == 400
        assert "base_kv_missing" in response.text


def test_a_handoff_is_read_once(pair: Pair, tokens: Tokens) -> None:
    prompt = tokens(50)
    handoff = pair.prefill(prompt)
    assert pair.decode(prompt, handoff).status == 200
    again = pair.decode(prompt, handoff)
    assert again.status == 400
    assert "handoff_taken" in again.error["message"]


def test_a_refused_handoff_frees_the_prefill_worker(pair: Pair, tokens: Tokens) -> None:
    prompt = tokens(50)
    with frees_prefill_blocks(pair):
        handoff = pair.prefill(prompt)
        pair.decode(prompt[:-1], handoff)


def test_an_abandoned_handoff_can_be_released(pair: Pair, tokens: Tokens) -> None:
    with frees_prefill_blocks(pair):
        handoff = pair.prefill(tokens(50))
        response = pair.http.post(
            f"{pair.decode_worker.url}/prefillshare/release", json={"kv_transfer_params": handoff}
        )
        assert response.status_code == 204


@contextmanager
def frees_prefill_blocks(pair: Pair) -> Iterator[None]:
    """What is leased inside is free again soon after, long before the lease ends."""
    usage = "vllm:kv_cache_usage_perc"
    before = pair.metric(pair.prefill_worker, usage)
    yield
    deadline = time.monotonic() + 5
    while (now := pair.metric(pair.prefill_worker, usage)) > before:
        assert time.monotonic() < deadline, f"prefill worker still uses {now:.1%} of its blocks"
        time.sleep(0.1)
