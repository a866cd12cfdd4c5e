"""The router speaks the OpenAI API on real engines: streaming, tools, schemas, n, logprobs."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.served import Served

pytestmark = pytest.mark.engine

USER: Any = {"role": "user", "content": "Name a colour. " * 6}
PAINT: Any = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paint the wall.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"colour": {"type": "string", "enum": ["red", "green"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}


def _extra(part: openai.BaseModel) -> dict[str, Any]:
    """Fields that the OpenAI API does not know."""
    return part.model_extra or {}


def test_streaming_returns_the_same_tokens(
    client: openai.OpenAI, new_session: Callable[[], str]
) -> None:
    options: dict[str, Any] = {
        "model": "planner",
        "messages": [USER],
        "temperature": 0,
        "max_tokens": 32,
        "extra_headers": {"X-Session-ID": new_session()},
        "extra_body": {"return_token_ids": True},
    }
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == whole.choices[0].message.content
    ids = [i for c in chunks for choice in c.choices for i in _extra(choice).get("token_ids") or ()]
    assert ids == _extra(whole.choices[0])["token_ids"]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["prefillshare"]["affinity"] == "hit"


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_tool_call_parses(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {
        "model": "planner",
        "messages": [USER],
        "tools": [PAINT],
        "tool_choice": {"type": "function", "function": {"name": "paint"}},
        "temperature": 0,
        "max_tokens": 96,
    }
    if stream:
        deltas = [
            call
            for chunk in client.chat.completions.create(**options, stream=True)
            for choice in chunk.choices
            for call in choice.delta.tool_calls or []
        ]
        names = {d.function.name for d in deltas if d.function and d.function.name}
        arguments = "".join(d.function.arguments or "" for d in deltas if d.function)
        assert names == {"paint"}
    else:
        [call] = client.chat.completions.create(**options).choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "paint"
        arguments = call.function.arguments
    assert json.loads(arguments)["colour"] in ("red", "green")


def test_a_tool_call_and_its_result_stay_in_the_shared_context(
    client: openai.OpenAI, new_session: Callable[[], str]
) -> None:
    headers = {"X-Session-ID": new_session()}
    messages: list[Any] = [USER]
    called = client.chat.completions.create(
        model="planner",
        messages=messages,
        tools=[PAINT],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=128,
        extra_headers=headers,
    )
    [call] = called.choices[0].message.tool_calls or []
    messages += [
        called.choices[0].message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "The wall is painted."},
    ]
    answer = client.chat.completions.create(
        model="solver", messages=messages, temperature=0, max_tokens=8, extra_headers=headers
    )
    assert answer.model_extra is not None
    assert answer.model_extra["prefillshare"]["break"] is None
    assert answer.model_extra["prefillshare"]["cached_tokens"] > 0


def test_a_json_schema_holds(client: openai.OpenAI) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"verdict": {"type": "string", "enum": ["right", "wrong"]}},
        "required": ["verdict"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="solver",
        messages=[USER],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "verdict", "schema": schema, "strict": True},
        },
        max_tokens=64,
    )
    assert json.loads(answer.choices[0].message.content or "")["verdict"] in ("right", "wrong")


def test_several_choices_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="planner",
        messages=[USER],
        n=2,
        seed=7,
        temperature=1.0,
        logprobs=True,
        top_logprobs=3,
        max_tokens=12,
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    for choice in answer.choices:
        assert choice.logprobs is not None
        for token in choice.logprobs.content or []:
            assert len(token.top_logprobs) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(
        len((choice.logprobs and choice.logprobs.content) or []) for choice in answer.choices
    )


def test_a_seed_repeats_a_sampled_answer(client: openai.OpenAI) -> None:
    texts = [
        client.chat.completions.create(
            model="planner",
            messages=[USER],
            seed=seed,
            temperature=1.0,
            max_tokens=12,
        )
        .choices[0]
        .message.content
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_completions_take_text_and_ids(client: openai.OpenAI) -> None:
    text = "abcdefgh" * 10
    options: dict[str, Any] = {"model": "solver", "temperature": 0, "max_tokens": 10}
    by_text = client.completions.create(prompt=text, **options)
    # The tiny models' tokenizer is byte level: a token id per character.
    assert by_text.usage is not None
    assert by_text.usage.prompt_tokens == len(text)
    assert by_text.usage.completion_tokens == 10


def test_a_stop_string_ends_the_answer(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "planner",
        "messages": [USER],
        "temperature": 0,
        "max_tokens": 32,
    }
    whole = client.chat.completions.create(**options).choices[0].message.content or ""
    stop = whole[5]
    stopped = client.chat.completions.create(**options, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == whole[: whole.index(stop)]


def test_models_lists_the_roles_and_flags_the_base(served: Served) -> None:
    models = httpx.get(f"{served.url}/v1/models", timeout=60).json()["data"]
    roles = {"planner", "toolcaller", "solver", "critic"}
    assert {model["id"] for model in models} == roles | {"base"}
    assert [m["id"] for m in models if m["prefillshare"]["kind"] == "base"] == ["base"]


def test_an_unknown_role_is_a_404_that_lists_the_roles(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"gamma.*critic.*planner"):
        client.chat.completions.create(model="gamma", messages=[USER])


def test_a_context_that_is_too_long_is_a_400_that_names_both_numbers(
    client: openai.OpenAI,
) -> None:
    long: Any = {"role": "user", "content": "x" * 5000}
    fitting: Any = {"role": "user", "content": "x"}
    usage = client.chat.completions.create(model="planner", messages=[fitting], max_tokens=1).usage
    assert usage is not None
    # A token for each character: the tiny models' tokenizer is byte level.
    prompt = usage.prompt_tokens - 1 + 5000
    with pytest.raises(openai.BadRequestError, match=rf"has {prompt} tokens.* holds 4096 tokens"):
        client.chat.completions.create(model="planner", messages=[long])


def test_a_decode_worker_called_without_base_kv_refuses(
    served: Served,
) -> None:
    [worker] = [worker for worker in served.workers if worker.pool == "planner"]
    answer = httpx.post(
        f"{worker.url}/v1/chat/completions",
        json={"model": worker.model, "messages": [USER], "max_tokens": 4},
        timeout=60,
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "base_kv_missing"


def test_metrics_and_health(served: Served) -> None:
    assert httpx.get(f"{served.url}/health", timeout=120).status_code == 200
    assert httpx.get(f"{served.url}/live", timeout=60).status_code == 200
    metrics = httpx.get(f"{served.url}/metrics", timeout=60).text
    assert "prefillshare_prefill_computed_tokens_total" in metrics
