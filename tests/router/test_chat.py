"""Chat calls through the router, over mock workers."""

from typing import Any

from tests.router.conftest import Bench, Start

SESSION = {"X-Session-ID": "order-4711"}


async def test_an_answer_is_openai_shaped_and_carries_the_report(bench: Bench) -> None:
    status, answer, headers = await bench.chat(headers=SESSION)
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "alpha"
    assert answer["choices"][0]["message"]["content"] == "alpha says yes"
    report = answer["prefillshare"]
    assert report["session"] == "order-4711"
    assert report["role"] == "alpha"
    assert report["prefill_worker"] == "prefill-0"
    assert report["decode_worker"] == "alpha-0"
    assert report["affinity"] == "new"
    assert report["cached_tokens"] == 0
    assert report["computed_tokens"] == answer["usage"]["prompt_tokens"]
    assert report["handoff_bytes"] > 0
    assert report["decode_prompt_tokens_computed"] == 1
    assert report["break"] is None
    assert headers["X-PrefillShare-Session"] == "order-4711"
    assert headers["X-PrefillShare-Prefill-Worker"] == "prefill-0"
    assert headers["X-PrefillShare-Decode-Worker"] == "alpha-0"
    assert headers["X-PrefillShare-Affinity"] == "new"
    assert headers["X-PrefillShare-Cached-Tokens"] == "0"
    assert headers["X-PrefillShare-Computed-Tokens"] == str(report["computed_tokens"])


async def test_internals_of_the_cluster_do_not_reach_the_client(bench: Bench) -> None:
    _, answer, _ = await bench.chat()
    assert not {"kv_transfer_params", "prompt_token_ids"} & answer.keys()
    assert "token_ids" not in answer["choices"][0]


async def test_token_ids_are_returned_where_asked_for(bench: Bench) -> None:
    _, answer, _ = await bench.chat(return_token_ids=True)
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]
    assert "kv_transfer_params" not in answer


async def test_usage_tells_what_the_prefill_worker_found_cached(bench: Bench) -> None:
    question = "another question about numbers " * 10
    _, first, _ = await bench.chat(question, headers=SESSION)
    _, second, _ = await bench.chat(question, headers=SESSION, model="beta")
    prompt = second["usage"]["prompt_tokens"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cached == (prompt - 1) // 16 * 16
    assert second["prefillshare"]["cached_tokens"] == cached
    assert second["prefillshare"]["computed_tokens"] == prompt - cached


async def test_every_parameter_passes_to_the_decode_worker_and_none_to_prefill(
    bench: Bench,
) -> None:
    parameters: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["\n"],
        "seed": 3,
        "logit_bias": {"5": 1},
        "min_tokens": 1,
        "response_format": {"type": "json_object"},
        "parallel_tool_calls": False,
        "logprobs": True,
        "top_logprobs": 2,
        "some_future_parameter": {"x": 1},
    }
    await bench.chat(**parameters)
    [sent] = bench.decode["alpha-0"].requests
    assert {name: sent[name] for name in parameters} == parameters
    [prefilled] = bench.prefill[0].requests
    assert not parameters.keys() & prefilled.keys() - {"temperature"}


async def test_a_cache_salt_reaches_both_workers(bench: Bench) -> None:
    await bench.chat(cache_salt="tenant-1")
    assert bench.prefill[0].requests[0]["cache_salt"] == "tenant-1"
    assert bench.decode["alpha-0"].requests[0]["cache_salt"] == "tenant-1"


async def test_several_choices_have_a_handoff_each(bench: Bench) -> None:
    _, answer, _ = await bench.chat(n=3, seed=7, headers=SESSION)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    # Sent at once, over a connection each.
    assert sorted(body["seed"] for body in bench.decode["alpha-0"].requests) == [7, 8, 9]
    assert len(bench.prefill[0].requests) == 3
    usage = answer["usage"]
    with_end_of_turn = len(bench.cluster.tokenizer.encode("alpha says yes").ids) + 1
    assert usage["completion_tokens"] == 3 * with_end_of_turn
    assert usage["prompt_tokens"] == len(bench.prefill[0].requests[0]["prompt"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_choices_of_a_call_spread_over_the_replicas(start: Start) -> None:
    async with start(decode=("alpha-0", "alpha-1")) as bench:
        _, answer, _ = await bench.chat(n=4)
        assert [len(worker.requests) for worker in bench.decode.values()] == [2, 2]
        assert answer["prefillshare"]["decode_worker"] == "alpha-0,alpha-1"


async def test_roles_prefill_the_same_context_tokens(bench: Bench) -> None:
    """The role switch only changes the appended tokens (I3)."""
    user = {"role": "user", "content": "the weather in Paris"}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    for role, head, tools in [("alpha", "You plan.", None), ("beta", "You check.", [tool])]:
        messages = [{"role": "system", "content": head}, user]
        body = {"model": role, "messages": messages, "tools": tools}
        status, _, _ = await bench.post("/v1/chat/completions", body)
        assert status == 200
    one, other = [body["prompt"] for body in bench.prefill[0].requests]
    text = "<|im_start|>user\nthe weather in Paris<|im_end|>\n"
    context = bench.cluster.tokenizer.encode(text).ids
    assert one[: len(context)] == other[: len(context)] == context
    assert one != other


async def test_text_parts_are_joined(bench: Bench) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"model": "alpha", "messages": [{"role": "user", "content": parts}]}
    await bench.post("/v1/chat/completions", body)
    prompt = bench.prefill[0].requests[0]["prompt"]
    text = bench.cluster.tokenizer.decode(prompt, skip_special_tokens=False)
    assert "user\na\nb<|im_end|>" in text


async def test_a_clients_request_id_comes_back_and_stays_here(bench: Bench) -> None:
    headers = {"X-Request-Id": "mine-1"}
    _, answer, answered = await bench.chat(headers=headers)
    assert answered["X-Request-Id"] == "mine-1"
    assert answer["id"] == "chatcmpl-mine-1"
    again, _, _ = await bench.chat(headers=headers)
    assert again == 200


async def test_an_account_that_cannot_be_had_leaves_its_numbers_unknown(bench: Bench) -> None:
    bench.decode["alpha-0"].keeps_accounts = False
    status, answer, _ = await bench.chat()
    assert status == 200
    report = answer["prefillshare"]
    assert report["handoff_bytes"] is None
    assert report["base_tokens_reused"] is None
    assert report["decode_prompt_tokens_computed"] is None
    assert report["computed_tokens"] == answer["usage"]["prompt_tokens"]


async def test_reasoning_is_hidden_here_and_not_at_the_worker(bench: Bench) -> None:
    """With `include_reasoning: false` vLLM hides token ids too, and nothing could be resumed."""
    _, answer, _ = await bench.chat(include_reasoning=False)
    assert bench.decode["alpha-0"].requests[-1]["include_reasoning"] is True
    assert "reasoning" not in answer["choices"][0]["message"]
    _, answer, _ = await bench.chat()
    assert "reasoning" in answer["choices"][0]["message"]
