"""A decode worker never computes a prompt that the base did not: it says why instead."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.reference import base_cache_logprobs
from tests.worker.conftest import HANDOFF_S
from tests.worker.driver import Pair, changed

pytestmark = [pytest.mark.engine, pytest.mark.exactness]

Tokens = Callable[[int], list[int]]


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


def test_a_refused_handoff_stays_readable(idle: Pair, tokens: Tokens) -> None:
    # By the scheduler, and by vLLM itself before the engine.
    prompt = tokens(50)
    handoff = idle.prefill(prompt)
    assert idle.decode(prompt[:-1], handoff).status == 400
    assert idle.decode(prompt, handoff, max_tokens=5000).status == 400
    assert idle.state(idle.prefill_worker)["open_leases"] == 1
    answer = idle.decode(prompt, handoff)
    assert answer.status == 200
    expected = base_cache_logprobs(idle.base_dir, idle.decoder_dir, prompt, answer.token_ids)
    assert answer.logprobs == pytest.approx(expected, abs=1e-3)


def test_refusals_are_no_errors_of_the_workers(idle: Pair, tokens: Tokens) -> None:
    workers = (idle.prefill_worker, idle.decode_worker)
    before = [idle.errors_logged(worker) for worker in workers]
    prompt = tokens(50)
    handoff = idle.prefill(prompt)
    for refused in (prompt[:-1], prompt, prompt):
        idle.decode(refused, handoff)
    idle.decode(prompt, changed(idle.prefill(prompt), expires_at=0))
    idle.release_all()
    idle.wait_until_idle(idle.prefill_worker)
    assert [idle.errors_logged(worker) for worker in workers] == before


@pytest.mark.parametrize(
    ("address", "within_s"),
    [
        # An answer is waited for, but not for `handoff_s`.
        ({"remote_port": 1}, HANDOFF_S / 2),
        ({"remote_port": 70000}, HANDOFF_S / 2),
        ({"remote_host": "no such host"}, HANDOFF_S / 2),
        # It is another one that answers: at once, for vLLM would wait for 5 s.
        ({"remote_engine_id": "nobody"}, 4),
    ],
)
def test_a_prefill_worker_that_is_not_there_ends_the_pull_with_a_mark(
    idle: Pair, tokens: Tokens, address: dict[str, Any], within_s: float
) -> None:
    prompt = tokens(50)
    before = idle.state(idle.decode_worker)
    took: list[float] = []
    # In one of three times: a busy machine adds to it.
    while not took or took[-1] >= within_s:
        assert len(took) < 3, took
        # An engine that the decode worker has not met, which it looks for at the address.
        unknown = {"remote_engine_id": f"unknown-{address}-{len(took)}"}
        handoff = {**idle.prefill(prompt), **unknown, **address}
        started = time.monotonic()
        answer = idle.decode(prompt, handoff)
        took.append(time.monotonic() - started)
        assert answer.choice["stop_reason"] == "prefillshare:kv_load_failed"
    idle.wait_until_idle(idle.decode_worker)
    after = idle.state(idle.decode_worker)
    assert after["events"]["kv_load_failed"] == before["events"]["kv_load_failed"] + len(took)
    assert after["base_tokens_received"] == before["base_tokens_received"]
