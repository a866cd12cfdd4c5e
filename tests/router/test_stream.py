"""Streamed calls: chunks pass as they come, the last one carries the report."""

import asyncio
import json
from typing import Any

from tests.router.conftest import WAIT_S, Bench

USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


def text_of(events: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for event in events[:-1]
        for choice in event["choices"]
        if choice["index"] == 0
    )


async def test_a_stream_says_what_the_whole_answer_says(bench: Bench) -> None:
    _, whole, _ = await bench.chat()
    events = await bench.stream()
    assert events[-1] == "[DONE]"
    assert text_of(events) == whole["choices"][0]["message"]["content"]
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}
    assert {event["model"] for event in events[:-1]} == {"alpha"}
    assert len({event["id"] for event in events[:-1]}) == 1


async def test_the_finish_chunk_carries_the_report_where_no_usage_is_asked_for(
    bench: Bench,
) -> None:
    events = await bench.stream()
    reported = [event for event in events[:-1] if "prefillshare" in event]
    assert reported == events[-2:-1]
    assert reported[0]["choices"][0]["finish_reason"] == "stop"
    assert reported[0]["prefillshare"]["handoff_bytes"] > 0
    assert not any(event.get("usage") for event in events[:-1])


async def test_the_usage_chunk_carries_the_report_where_usage_is_asked_for(bench: Bench) -> None:
    question = "another question about numbers " * 10
    await bench.stream(question)
    events = await bench.stream(question, **USAGE)
    last = events[-2]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert last["prefillshare"]["cached_tokens"] > 0
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    assert "prefillshare" not in events[-3]


async def test_token_ids_stay_inside_unless_asked_for(bench: Bench) -> None:
    plain = await bench.stream()
    assert not any("prompt_token_ids" in event for event in plain[:-1])
    assert not any("token_ids" in c for event in plain[:-1] for c in event["choices"])
    asked = await bench.stream(return_token_ids=True)
    assert asked[0]["prompt_token_ids"] == bench.prefill[0].requests[0]["prompt"]
    assert any(c["token_ids"] for event in asked[:-1] for c in event["choices"])


async def test_chunks_that_only_carry_token_ids_are_not_sent(bench: Bench) -> None:
    bench.decode["alpha-0"].tool_calls = [
        {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    ]
    events = await bench.stream()
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0]["role"] == "assistant"
    assert deltas[1]["tool_calls"][0]["id"] == "call-1"
    assert len(deltas) == 2


async def test_the_first_chunk_is_sent_while_the_rest_is_generated(bench: Bench) -> None:
    worker = bench.decode["alpha-0"]
    worker.pace = asyncio.Semaphore(1)
    body = {"model": "alpha", "messages": [{"role": "user", "content": "a"}], "stream": True}
    async with bench.http.post(f"{bench.url}/v1/chat/completions", json=body) as response:
        seen = b""
        async with asyncio.timeout(WAIT_S):
            while b"alpha says" not in seen:
                seen += await response.content.readany()
        assert b" yes" not in seen
        worker.pace.release()
        seen += await response.content.read()
    assert seen.endswith(b"data: [DONE]\n\n")


async def test_headers_are_known_before_the_first_token(bench: Bench) -> None:
    body = {"model": "alpha", "messages": [{"role": "user", "content": "a"}], "stream": True}
    headers = {"X-Session-ID": "s"}
    url = f"{bench.url}/v1/chat/completions"
    async with bench.http.post(url, json=body, headers=headers) as response:
        assert response.headers["X-PrefillShare-Prefill-Worker"] == "prefill-0"
        assert response.headers["X-PrefillShare-Affinity"] == "new"
        assert int(response.headers["X-PrefillShare-Computed-Tokens"]) > 0


async def test_choices_of_a_stream_are_told_apart_by_index(bench: Bench) -> None:
    events = await bench.stream(n=3, **USAGE)
    texts = dict.fromkeys(range(3), "")
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == dict.fromkeys(range(3), "alpha says yes")
    assert [event for event in events[:-1] if event.get("usage")] == events[-2:-1]
    assert events.count("[DONE]") == 1


async def test_continuous_usage_is_only_passed_on_with_usage(bench: Bench) -> None:
    await bench.stream(stream_options={"continuous_usage_stats": True})
    await bench.stream(stream_options={"include_usage": True, "continuous_usage_stats": True})
    sent = [body["stream_options"] for body in bench.decode["alpha-0"].requests]
    assert sent == [
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": True},
    ]


async def test_completions_stream_too(bench: Bench) -> None:
    body = {"model": "beta", "prompt": "a question", "stream": True, "max_tokens": 5}
    async with bench.http.post(f"{bench.url}/v1/completions", json=body) as response:
        text = await response.text()
    events = [json.loads(event[6:]) for event in text.split("\n\n") if event.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == "beta says yes"
    assert events[-1]["prefillshare"]["role"] == "beta"
