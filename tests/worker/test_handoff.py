"""Base KV reaches the decoder, and only base KV: the answers equal an in-process reference."""

import time
from collections.abc import Callable

import pytest

from tests.reference import base_cache_greedy, base_cache_logprobs
from tests.worker.driver import BLOCK, Answer, Pair

pytestmark = [pytest.mark.engine, pytest.mark.exactness]

Tokens = Callable[[int], list[int]]


def assert_exact(pair: Pair, prompt: list[int], answer: Answer) -> None:
    expected = base_cache_logprobs(pair.base_dir, pair.decoder_dir, prompt, answer.token_ids)
    assert answer.logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 300])
def test_first_call_is_exact(pair: Pair, tokens: Tokens, length: int) -> None:
    prompt = tokens(length)
    answer = pair.call(prompt)
    assert_exact(pair, prompt, answer)


def test_the_reference_differs_from_a_decoder_that_prefills_itself(
    pair: Pair, tokens: Tokens
) -> None:
    prompt = tokens(300)
    output = base_cache_greedy(pair.base_dir, pair.decoder_dir, prompt, 8)
    shared = base_cache_logprobs(pair.base_dir, pair.decoder_dir, prompt, output)
    alone = base_cache_logprobs(pair.decoder_dir, pair.decoder_dir, prompt, output)
    assert max(abs(a - b) for a, b in zip(shared, alone, strict=True)) > 1e-2


def test_a_return_with_its_own_output_in_the_context_is_exact(pair: Pair, tokens: Tokens) -> None:
    first = tokens(300)
    context = first + pair.call(first, max_tokens=64).token_ids + tokens(40)
    answer = pair.call(context)
    assert_exact(pair, context, answer)


def test_a_return_receives_only_the_blocks_it_lacks(pair: Pair, tokens: Tokens) -> None:
    first = tokens(300)
    output = pair.call(first, max_tokens=64).token_ids
    context = first + output + tokens(40)
    account = pair.account(pair.call(context))
    # (300 - 1) // 32 blocks came from the base; blocks with the decoder's own KV are not reused.
    assert account["base_tokens_reused"] == 9 * BLOCK
    assert account["base_tokens_received"] == len(context) - 1 - 9 * BLOCK
    blocks = -(-(len(context) - 1) // BLOCK) - 9
    assert account["handoff_bytes"] == blocks * pair.decode_worker.block_bytes


def test_the_last_prompt_token_is_never_shared(pair: Pair, tokens: Tokens) -> None:
    # Its KV fills the third block, but the decoder computed it.
    prompt = tokens(3 * BLOCK)
    pair.call(prompt)
    account = pair.account(pair.call(prompt + tokens(5)))
    assert account["base_tokens_reused"] == 2 * BLOCK


def test_the_same_prompt_again_receives_nothing(pair: Pair, tokens: Tokens) -> None:
    prompt = tokens(2 * BLOCK + 1)
    pair.call(prompt)
    answer = pair.call(prompt)
    assert pair.account(answer) == {
        "base_tokens_received": 0,
        "base_tokens_reused": 2 * BLOCK,
        "base_tokens_computed": 0,
        "prompt_tokens_computed": 1,
        "generated_tokens_recomputed": 0,
        "handoff_bytes": 0,
        "event": None,
    }
    assert_exact(pair, prompt, answer)


def test_the_account_agrees_with_the_metrics(pair: Pair, tokens: Tokens) -> None:
    before = pair.metric(pair.decode_worker, "vllm:nixl_bytes_transferred_sum")
    answer = pair.call(tokens(300))
    account = pair.account(answer)
    moved = pair.metric(pair.decode_worker, "vllm:nixl_bytes_transferred_sum") - before
    assert account == {
        "base_tokens_received": 299,
        "base_tokens_reused": 0,
        "base_tokens_computed": 0,
        "prompt_tokens_computed": 1,
        "generated_tokens_recomputed": 0,
        "handoff_bytes": moved,
        "event": None,
    }


def test_an_account_can_be_read_again(pair: Pair, tokens: Tokens) -> None:
    answer = pair.call(tokens(10))
    assert pair.account(answer) == pair.account(answer)


def test_an_answer_that_a_stop_string_ends_has_an_account(pair: Pair, tokens: Tokens) -> None:
    prompt = tokens(70)
    text = pair.call(prompt).choice["text"]
    stopped = pair.call(prompt, stop=[text[3]])
    assert stopped.choice["finish_reason"] == "stop"
    assert pair.account(stopped)["prompt_tokens_computed"] == 1


def test_chat_with_token_ids_gives_the_tokens_of_the_reference(pair: Pair, tokens: Tokens) -> None:
    prompt = tokens(200)
    answer = pair.chat(prompt, pair.prefill(prompt))
    expected = base_cache_greedy(pair.base_dir, pair.decoder_dir, prompt, 8)
    assert answer.token_ids == expected
    assert pair.account(answer)["base_tokens_received"] == 199


def test_a_stream_gives_the_tokens_of_the_reference(pair: Pair, tokens: Tokens) -> None:
    prompt = tokens(200)
    status, chunks = pair.stream_chat(prompt, pair.prefill(prompt))
    streamed = [
        token
        for chunk in chunks
        for choice in chunk["choices"]
        for token in choice.get("token_ids") or []
    ]
    assert (status, streamed) == (
        200,
        base_cache_greedy(pair.base_dir, pair.decoder_dir, prompt, 8),
    )


def test_prefill_reports_its_own_cache_hits(pair: Pair, tokens: Tokens) -> None:
    prompt = tokens(300)
    cold = pair.prefill_answer(prompt)
    warm = pair.prefill_answer(prompt + tokens(50))
    assert cold["kv_transfer_params"]["remote_prefill_cached_tokens"] == 0
    assert warm["kv_transfer_params"]["remote_prefill_cached_tokens"] == 9 * BLOCK
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 9 * BLOCK


def test_workers_describe_themselves(pair: Pair) -> None:
    before = time.time()
    prefill, decode = pair.info(pair.prefill_worker), pair.info(pair.decode_worker)
    assert (prefill["phase"], prefill["model"], prefill["num_blocks"]) == ("prefill", "base", 256)
    assert (decode["phase"], decode["model"], decode["num_blocks"]) == ("decode", "solver", 40)
    for field in ("base_fingerprint", "block_size", "block_bytes", "max_model_len", "vllm"):
        assert prefill[field] == decode[field]
    assert prefill["engine_id"] != decode["engine_id"]
    assert before <= decode["now"] <= time.time()
    # Keys and values of 4 layers, 2 KV heads of size 32, in fp32.
    assert decode["block_bytes"] == 2 * 4 * 2 * 32 * 4 * BLOCK
