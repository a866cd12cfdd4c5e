"""An answer that moves to another worker comes out as if one worker had given all of it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.reference import base_cache_logprobs
from tests.worker.driver import BLOCK, Answer, Pair, resuming

pytestmark = [pytest.mark.engine, pytest.mark.exactness]

Tokens = Callable[[int], list[int]]

PROMPT = [7 * index % 94 for index in range(70)]
"""Whole characters: vLLM puts the text of a prompt that ends within one before the answer's."""

WHOLE = 60


@pytest.fixture(scope="module")
def whole(pair: Pair) -> Callable[[int], tuple[list[int], Answer]]:
    """A prompt of the given length and its uninterrupted answer; one per length."""
    known: dict[int, tuple[list[int], Answer]] = {}

    def of_length(length: int) -> tuple[list[int], Answer]:
        if length not in known:
            prompt = [(7 * index + length) % 94 for index in range(length)]
            known[length] = prompt, pair.call(prompt, max_tokens=WHOLE)
        return known[length]

    return of_length


@pytest.mark.parametrize("begun", [1, 31, 32, 45])
@pytest.mark.parametrize("length", [33, 64, 65, 320, 321, 337])
def test_the_rest_is_exact(pair: Pair, whole: Any, length: int, begun: int) -> None:
    prompt, expected = whole(length)
    resumed = pair.resume(prompt, expected.token_ids[:begun], max_tokens=WHOLE)
    assert resumed.token_ids == expected.token_ids
    assert resumed.logprobs[begun:] == pytest.approx(expected.logprobs[begun:], abs=1e-3)


@pytest.mark.exactness
def test_the_rest_equals_the_reference(pair: Pair, tokens: Tokens) -> None:
    # Tokens the decoder would not have chosen itself, so that only running them gives their KV.
    prompt, begun = tokens(200), tokens(40)
    resumed = pair.resume(prompt, begun, max_tokens=60)
    expected = base_cache_logprobs(pair.base_dir, pair.decoder_dir, prompt, resumed.token_ids)
    assert resumed.token_ids[:40] == begun
    assert resumed.logprobs[40:] == pytest.approx(expected[40:], abs=1e-3)


def test_base_kv_of_the_answer_is_not_used(pair: Pair, tokens: Tokens) -> None:
    prompt = tokens(300)
    uninterrupted = pair.call(prompt, max_tokens=60)
    # A later turn brought the base's KV of prompt + answer into the decode worker's cache.
    pair.call(prompt + uninterrupted.token_ids + tokens(3))
    resumed = pair.resume(prompt, uninterrupted.token_ids[:45], max_tokens=60)
    assert resumed.logprobs[45:] == pytest.approx(uninterrupted.logprobs[45:], abs=1e-3)
    account = pair.account(resumed)
    assert account["base_tokens_reused"] == 9 * BLOCK
    # Neither may the next turn find what the decoder computed.
    again = pair.account(pair.call(prompt + uninterrupted.token_ids + tokens(3)))
    assert again["base_tokens_reused"] == (300 + 60) // BLOCK * BLOCK


def test_account_and_usage_see_the_whole_answer(pair: Pair, tokens: Tokens) -> None:
    prompt = tokens(100)
    begun = pair.call(prompt, max_tokens=15).token_ids
    resumed = pair.resume(prompt, begun, max_tokens=20)
    assert len(resumed.token_ids) == 20
    assert resumed.choice["finish_reason"] == "length"
    assert resumed.body["usage"]["prompt_tokens"] == 100
    assert resumed.body["usage"]["completion_tokens"] == 20
    account = pair.account(resumed)
    assert account["prompt_tokens_computed"] == 1
    assert account["generated_tokens_recomputed"] == 15


def test_logprobs_are_complete(pair: Pair, tokens: Tokens) -> None:
    prompt = tokens(70)
    expected = pair.call(prompt, logprobs=2, max_tokens=12).choice["logprobs"]
    begun = pair.call(prompt, max_tokens=7).token_ids
    resumed = pair.resume(prompt, begun, logprobs=2, max_tokens=12).choice["logprobs"]
    assert resumed["tokens"] == expected["tokens"]
    assert resumed["text_offset"] == expected["text_offset"]
    for ours, theirs in zip(resumed["top_logprobs"][7:], expected["top_logprobs"][7:], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


class TestStreams:
    """A stream repeats what was generated before, token by token, then goes on."""

    def test_completions(self, pair: Pair) -> None:
        expected = pair.stream(PROMPT, max_tokens=12, logprobs=1)
        begun = streamed_ids(expected)[:7]
        resumed = pair.stream(PROMPT, begun, max_tokens=12, logprobs=1)
        assert per_choice(resumed, "token_ids")[:7] == [[token] for token in begun]
        assert streamed_ids(resumed) == streamed_ids(expected)
        assert streamed_text(resumed) == streamed_text(expected)
        assert text_offsets(resumed) == text_offsets(expected) == list(range(12))
        assert resumed[-1]["usage"]["completion_tokens"] == 12

    def test_chat(self, pair: Pair) -> None:
        body = {"max_tokens": 12, "logprobs": True, "top_logprobs": 2}
        _, expected = pair.stream_chat(PROMPT, pair.prefill(PROMPT), **body)
        begun = streamed_ids(expected)[:7]
        status, resumed = pair.stream_chat(PROMPT, resuming(pair.prefill(PROMPT), begun), **body)
        assert status == 200
        assert streamed_ids(resumed) == streamed_ids(expected)
        assert streamed_text(resumed) == streamed_text(expected)
        ours, theirs = chat_logprobs(resumed), chat_logprobs(expected)
        assert [entry["token"] for entry in ours] == [entry["token"] for entry in theirs]
        assert [len(entry["top_logprobs"]) for entry in ours] == [1] * 7 + [2] * 5
        assert resumed[-1]["choices"][0]["finish_reason"] == "length"

    def test_a_refusal_is_not_preceded_by_a_replay(self, pair: Pair, tokens: Tokens) -> None:
        prompt = tokens(70)
        handoff = resuming(pair.prefill(prompt), tokens(5))
        status, chunks = pair.stream_chat(prompt[:-1], handoff)
        assert (status, streamed_ids(chunks)) == (200, [])
        assert "prompt_mismatch" in json.dumps(chunks)


class TestSampling:
    """What depends on the tokens generated so far."""

    @pytest.mark.parametrize(
        "penalty",
        [{"presence_penalty": 1.5}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.3}],
    )
    def test_penalties(self, pair: Pair, whole: Any, penalty: dict[str, float]) -> None:
        prompt, without = whole(65)
        expected = pair.call(prompt, max_tokens=40, **penalty)
        assert expected.token_ids != without.token_ids[:40]
        resumed = pair.resume(prompt, expected.token_ids[:20], max_tokens=40, **penalty)
        assert resumed.token_ids == expected.token_ids
        assert resumed.logprobs[20:] == pytest.approx(expected.logprobs[20:], abs=1e-3)

    def test_min_tokens(self, pair: Pair, tokens: Tokens) -> None:
        prompt = tokens(70)
        # Any token ends the answer, but not before it has 12.
        sampling = {"min_tokens": 12, "stop_token_ids": list(range(256)), "max_tokens": 40}
        expected = pair.call(prompt, **sampling)
        assert len(expected.token_ids) == 13
        resumed = pair.resume(prompt, expected.token_ids[:10], **sampling)
        assert resumed.token_ids == expected.token_ids

    @pytest.mark.parametrize("filtering", [{}, {"top_k": 20}, {"top_p": 0.9}])
    def test_a_seed(self, pair: Pair, tokens: Tokens, filtering: dict[str, Any]) -> None:
        prompt = tokens(70)
        sampling = {"temperature": 1, "seed": 11, "max_tokens": 40, **filtering}
        expected = pair.call(prompt, **sampling)
        resumed = pair.resume(prompt, expected.token_ids[:15], **sampling)
        assert resumed.token_ids == expected.token_ids

    def test_a_seed_and_an_answer_so_far_in_chunks(self, pair: Pair, tokens: Tokens) -> None:
        prompt = tokens(70)
        sampling = {"temperature": 1, "seed": 11, "max_tokens": 160}
        expected = pair.call(prompt, **sampling)
        # The decode worker computes 64 tokens at a time.
        resumed = pair.resume(prompt, expected.token_ids[:150], **sampling)
        assert resumed.token_ids == expected.token_ids
        assert pair.account(resumed)["generated_tokens_recomputed"] == 150


class TestText:
    """Borders inside of something that the worker's server reads as one."""

    @pytest.mark.parametrize("include", [False, True])
    def test_a_stop_string(self, pair: Pair, whole: Any, include: bool) -> None:
        prompt, uninterrupted = whole(65)
        begun = uninterrupted.token_ids[:20]
        stop = uninterrupted.choice["text"][18:22]
        sampling = {"max_tokens": 40, "stop": [stop], "include_stop_str_in_output": include}
        expected = pair.call(prompt, **sampling)
        resumed = pair.resume(prompt, begun, **sampling)
        assert resumed.choice["text"] == expected.choice["text"]
        assert resumed.choice["stop_reason"] == stop
        chunks = pair.stream(prompt, begun, **sampling)
        assert streamed_text(chunks) == expected.choice["text"]
        assert pair.account(resumed)["generated_tokens_recomputed"] == 20

    def test_a_character_of_several_bytes(self, pair: Pair) -> None:
        sampling = {"structured_outputs": {"choice": [LETTERS]}, "max_tokens": 60}
        expected = pair.call(PROMPT, ignore_eos=False, **sampling)
        assert expected.choice["text"] == LETTERS
        for begun in (2, 3, 5, 8):
            chunks = pair.stream(PROMPT, expected.token_ids[:begun], ignore_eos=False, **sampling)
            assert streamed_text(chunks) == LETTERS

    def test_a_json_schema(self, pair: Pair) -> None:
        body = {"max_tokens": 80, "ignore_eos": False, "response_format": SCHEMA}
        expected = pair.chat(PROMPT, pair.prefill(PROMPT), **body)
        assert json.loads(expected.choice["message"]["content"])["colour"] == "green"
        for begun in (1, 9, 16):
            handoff = resuming(pair.prefill(PROMPT), expected.token_ids[:begun])
            resumed = pair.chat(PROMPT, handoff, **body)
            assert resumed.choice["message"] == expected.choice["message"]
            assert resumed.token_ids == expected.token_ids

    def test_a_forced_tool_call(self, pair: Pair) -> None:
        body = {
            "max_tokens": 120,
            "ignore_eos": False,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "paint"}},
        }
        whole = pair.chat(PROMPT, pair.prefill(PROMPT), **body)
        _, expected = pair.stream_chat(PROMPT, pair.prefill(PROMPT), **body)
        name, arguments = streamed_call(expected)
        assert (name, json.loads(arguments)["colour"]) == ("paint", "green")
        for begun in (1, 16, 50):
            handoff = resuming(pair.prefill(PROMPT), whole.token_ids[:begun])
            _, chunks = pair.stream_chat(PROMPT, handoff, **body)
            assert streamed_call(chunks) == (name, arguments)
            handoff = resuming(pair.prefill(PROMPT), whole.token_ids[:begun])
            resumed = pair.chat(PROMPT, handoff, **body)
            [ours], [theirs] = (
                answer.choice["message"]["tool_calls"] for answer in (resumed, whole)
            )
            assert ours["function"] == theirs["function"]

    def test_a_grammar_that_the_answer_so_far_breaks(self, idle: Pair) -> None:
        handoff = resuming(idle.prefill(PROMPT), [65, 66])
        body = {"max_tokens": 80, "ignore_eos": False, "response_format": SCHEMA}
        assert idle.chat(PROMPT, handoff, **body).status == 500
        idle.wait_until_idle(idle.decode_worker)


class TestCompleteAnswers:
    """Nothing is left to generate: the answer ends as it would have."""

    def test_by_its_length(self, pair: Pair, whole: Any) -> None:
        prompt, uninterrupted = whole(65)
        resumed = pair.resume(prompt, uninterrupted.token_ids[:20], max_tokens=20)
        assert resumed.token_ids == uninterrupted.token_ids[:20]
        assert resumed.choice["finish_reason"] == "length"

    def test_by_a_stop_string(self, pair: Pair, whole: Any) -> None:
        prompt, uninterrupted = whole(65)
        stop = uninterrupted.choice["text"][10:13]
        expected = pair.call(prompt, max_tokens=40, stop=[stop])
        chunks = pair.stream(prompt, uninterrupted.token_ids[:20], max_tokens=40, stop=[stop])
        assert streamed_text(chunks) == expected.choice["text"]

    def test_by_a_stop_token(self, pair: Pair, whole: Any) -> None:
        prompt, uninterrupted = whole(65)
        last = uninterrupted.token_ids[9]
        begun = uninterrupted.token_ids[: uninterrupted.token_ids.index(last) + 1]
        resumed = pair.resume(prompt, begun, max_tokens=40, stop_token_ids=[last])
        assert (resumed.token_ids, resumed.choice["stop_reason"]) == (begun, last)

    def test_they_leave_nothing(self, idle: Pair, whole: Any) -> None:
        self.test_by_its_length(idle, whole)
        self.test_by_a_stop_string(idle, whole)
        idle.wait_until_idle(idle.prefill_worker)
        idle.wait_until_idle(idle.decode_worker)


class TestRefusals:
    @pytest.mark.parametrize("begun", [[259], [65, 1 << 40]])
    def test_tokens_the_engine_would_die_of(
        self, pair: Pair, tokens: Tokens, begun: list[int]
    ) -> None:
        prompt = tokens(30)
        answer = pair.decode(prompt, resuming(pair.prefill(prompt), begun))
        assert (answer.status, answer.error["code"]) == (400, "generated_ids_invalid")

    def test_an_answer_so_far_in_the_prompt(self, pair: Pair, tokens: Tokens) -> None:
        prompt = tokens(30)
        answer = pair.decode(prompt + tokens(5), pair.prefill(prompt))
        assert answer.status == 400
        assert "prompt_mismatch" in answer.error["message"]

    def test_what_are_no_tokens(self, pair: Pair, tokens: Tokens) -> None:
        prompt = tokens(30)
        handoff = pair.prefill(prompt)
        handoff["prefillshare"]["generated_ids"] = [-1]
        answer = pair.decode(prompt, handoff)
        assert (answer.status, answer.error["code"]) == (400, "base_kv_missing")


LETTERS = "a→ä😀-und-dann"
SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "paint",
        "schema": {
            "type": "object",
            "properties": {
                "colour": {"const": "green"},
                "coats": {"type": "integer", "minimum": 1, "maximum": 3},
            },
            "required": ["colour", "coats"],
            "additionalProperties": False,
        },
    },
}
TOOL: dict[str, Any] = {
    "type": "function",
    # vLLM holds a call to the parameters only of a strict tool.
    "function": {
        "name": "paint",
        "parameters": SCHEMA["json_schema"]["schema"],
        "strict": True,
    },
}


def per_choice(chunks: list[dict[str, Any]], field: str) -> list[Any]:
    return [choice.get(field) for chunk in chunks for choice in chunk.get("choices", ())]


def streamed_ids(chunks: list[dict[str, Any]]) -> list[int]:
    return [token for tokens in per_choice(chunks, "token_ids") for token in tokens or ()]


def streamed_text(chunks: list[dict[str, Any]]) -> str:
    deltas = [delta.get("content") for delta in per_choice(chunks, "delta") if delta]
    return "".join(part or "" for part in [*per_choice(chunks, "text"), *deltas])


def streamed_call(chunks: list[dict[str, Any]]) -> tuple[str, str]:
    """Name and arguments of the only tool call."""
    deltas = [
        part["function"]
        for delta in per_choice(chunks, "delta")
        for part in delta.get("tool_calls") or ()
    ]
    name = "".join(part.get("name") or "" for part in deltas)
    return name, "".join(part.get("arguments") or "" for part in deltas)


def text_offsets(chunks: list[dict[str, Any]]) -> list[int]:
    logprobs = [found for found in per_choice(chunks, "logprobs") if found]
    return [offset for found in logprobs for offset in found["text_offset"]]


def chat_logprobs(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        entry for found in per_choice(chunks, "logprobs") if found for entry in found["content"]
    ]
