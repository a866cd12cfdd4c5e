"""`POST /tokenize` counts what a call would count, and changes nothing."""

from typing import Any

import pytest

from tests.mocks.mock_workers import MAX_MODEL_LEN
from tests.router.conftest import Bench

SESSION = {"X-Session-ID": "s"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


async def test_a_chat_has_the_ids_that_its_call_has(bench: Bench) -> None:
    messages = [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": "a question"},
    ]
    body = {"model": "alpha", "messages": messages, "tools": [TOOL]}
    status, told, _ = await bench.post("/tokenize", body)
    assert status == 200
    _, answer, _ = await bench.post("/v1/chat/completions", body)
    assert told["tokens"] == bench.prefill[0].requests[0]["prompt"]
    assert told["count"] == len(told["tokens"]) == answer["usage"]["prompt_tokens"]
    assert told["max_model_len"] == MAX_MODEL_LEN
    assert told["token_strs"] is None


async def test_generated_ids_of_the_session_count_as_they_were_generated(bench: Bench) -> None:
    bench.decode["alpha-0"].script = lambda body: ["que", "st", "ion", "s"]
    _, answer, _ = await bench.chat(headers=SESSION)
    messages = [
        {"role": "user", "content": "a question"},
        answer["choices"][0]["message"],
        {"role": "user", "content": "more"},
    ]
    body = {"model": "beta", "messages": messages}
    _, alone, _ = await bench.post("/tokenize", body)
    _, told, _ = await bench.post("/tokenize", body, SESSION)
    _, child, _ = await bench.post(
        "/tokenize", body, {"X-Session-ID": "new", "X-Parent-Session-ID": "s"}
    )
    await bench.post("/v1/chat/completions", body, SESSION)
    assert told["tokens"] == child["tokens"] == bench.prefill[0].requests[1]["prompt"]
    assert told["count"] > alone["count"]


async def test_it_reads_a_session_and_never_makes_or_changes_one(bench: Bench) -> None:
    body = {"model": "alpha", "messages": [{"role": "user", "content": "a question"}]}
    await bench.post("/tokenize", body, SESSION)
    assert not bench.router.sessions._sessions
    await bench.chat(headers=SESSION)
    before = (await bench.get("/v1/sessions/s"))[1]
    other = {"model": "alpha", "messages": [{"role": "user", "content": "the weather"}]}
    await bench.post("/tokenize", other, SESSION)
    assert (await bench.get("/v1/sessions/s"))[1] == before
    assert (await bench.chat("a question", headers=SESSION))[1]["prefillshare"]["break"] is None
    assert await bench.metric("prefillshare_prefix_breaks_total") == 0


async def test_a_prompt_is_tokenised_as_a_completion_would_be(bench: Bench) -> None:
    body = {"model": "alpha", "prompt": "a question", "return_token_strs": True}
    _, told, _ = await bench.post("/tokenize", body)
    await bench.post("/v1/completions", {"model": "alpha", "prompt": "a question"})
    assert told["tokens"] == bench.prefill[0].requests[0]["prompt"]
    assert "".join(told["token_strs"]).replace("Ġ", " ") == "a question"


async def test_more_tokens_than_fit_are_counted_as_well(bench: Bench) -> None:
    body = {"model": "alpha", "prompt": "yes no " * MAX_MODEL_LEN}
    status, told, _ = await bench.post("/tokenize", body)
    assert status == 200
    assert told["count"] > told["max_model_len"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "nobody", "prompt": "a"}, 404, "model"),
        ({"prompt": "a"}, 400, "model"),
        ({"model": "alpha"}, 400, "prompt"),
        ({"model": "alpha", "prompt": ["a", "b"]}, 400, "prompt"),
        ({"model": "alpha", "messages": "a"}, 400, "messages"),
        ({"model": "alpha", "prompt": "a", "return_token_strs": 3}, 400, "return_token_strs"),
    ],
)
async def test_what_no_call_could_be_made_of_is_refused(
    bench: Bench, body: Any, status: int, param: str
) -> None:
    got, answer, _ = await bench.post("/tokenize", body)
    assert (got, answer["error"]["param"]) == (status, param)
