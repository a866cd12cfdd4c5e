"""Completions calls: text or ids, one prompt or several."""

from typing import Any

import pytest

from tests.router.conftest import Bench

URL = "/v1/completions"


async def test_text_and_ids_are_the_same_prompt(bench: Bench) -> None:
    text = "a question about numbers"
    ids = bench.cluster.tokenizer.encode(text).ids
    for prompt in (text, ids):
        status, answer, _ = await bench.post(URL, {"model": "alpha", "prompt": prompt})
        assert status == 200
        assert answer["object"] == "text_completion"
        assert answer["choices"][0]["text"] == "alpha says yes"
        assert answer["id"].startswith("cmpl-")
    assert [body["prompt"] for body in bench.prefill[0].requests] == [ids, ids]
    assert [body["prompt"] for body in bench.decode["alpha-0"].requests] == [ids, ids]


async def test_several_prompts_and_choices_are_numbered_like_openais(bench: Bench) -> None:
    worker = bench.decode["beta-0"]
    worker.script = lambda body: [f"{len(body['prompt'])}/{body['seed']}"]
    body = {"model": "beta", "prompt": [[1, 2], [1, 2, 3]], "n": 2, "seed": 5}
    _, answer, _ = await bench.post(URL, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["2/5", "2/6", "3/5", "3/6"]
    assert answer["usage"]["prompt_tokens"] == 5


async def test_a_prompt_of_one_token_is_served(bench: Bench) -> None:
    status, answer, _ = await bench.post(URL, {"model": "alpha", "prompt": [7]})
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == 1


async def test_a_session_continues_over_completions(bench: Bench) -> None:
    headers = {"X-Session-ID": "s"}
    prompt = list(range(10, 74))
    for role, ids in [("alpha", prompt), ("beta", prompt + prompt[:16])]:
        _, answer, _ = await bench.post(URL, {"model": role, "prompt": ids}, headers)
    assert answer["prefillshare"]["affinity"] == "hit"
    assert answer["prefillshare"]["cached_tokens"] == 64
    _, totals = await bench.get("/v1/sessions/s")
    assert totals["per_model_prefill_tokens"] == 64 + 80


@pytest.mark.parametrize("prompt", [None, [], "", [""], 5, [[]], [1, "a"], [True], [-1], {"a": 1}])
async def test_what_is_no_prompt_is_refused(bench: Bench, prompt: Any) -> None:
    status, body, _ = await bench.post(URL, {"model": "alpha", "prompt": prompt})
    assert (status, body["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("field", ["echo", "suffix"])
async def test_echo_and_suffix_are_refused(bench: Bench, field: str) -> None:
    body = {"model": "alpha", "prompt": "a", field: "x" if field == "suffix" else True}
    status, answer, _ = await bench.post(URL, body)
    assert (status, answer["error"]["param"]) == (400, field)
