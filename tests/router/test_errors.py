"""What cannot be served is refused before anything is computed, naming field and remedy."""

import io
from typing import Any

import pytest

from tests.mocks.mock_workers import MAX_MODEL_LEN
from tests.router.conftest import Bench, Start


def nothing_was_computed(bench: Bench) -> bool:
    return not bench.prefill[0].requests


async def test_an_unknown_role_is_a_404_that_lists_the_roles(bench: Bench) -> None:
    status, body, _ = await bench.chat(model="gamma")
    assert status == 404
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == "model"
    assert body["error"]["code"] == "model_not_found"
    assert "'gamma'" in body["error"]["message"]
    assert "alpha, beta" in body["error"]["message"]


async def test_the_base_is_not_callable(bench: Bench) -> None:
    status, body, _ = await bench.chat(model="base")
    assert (status, body["error"]["code"]) == (400, "model_not_callable")
    assert "alpha, beta" in body["error"]["message"]


async def test_a_missing_model_is_a_400_that_lists_the_roles(bench: Bench) -> None:
    status, body, _ = await bench.chat(model=None)
    assert (status, body["error"]["param"]) == (400, "model")
    assert "alpha, beta" in body["error"]["message"]


@pytest.mark.parametrize("max_tokens", [None, 100])
async def test_a_context_that_is_too_long_names_both_numbers(
    bench: Bench, max_tokens: int | None
) -> None:
    status, body, _ = await bench.chat("é" * MAX_MODEL_LEN, max_tokens=max_tokens)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert str(MAX_MODEL_LEN) in body["error"]["message"]
    assert body["error"]["param"] == "messages"
    assert nothing_was_computed(bench)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_too_many_new_tokens_name_the_field(bench: Bench, field: str) -> None:
    fields: dict[str, Any] = {field: MAX_MODEL_LEN}
    status, body, _ = await bench.chat(**fields)
    assert (status, body["error"]["param"]) == (400, field)
    assert f"{MAX_MODEL_LEN} more" in body["error"]["message"]
    assert nothing_was_computed(bench)


async def test_the_whole_context_can_be_used(start: Start) -> None:
    async with start(settings={"max_model_len": 64}) as bench:
        status, answer, _ = await bench.chat(max_tokens=8)
        room = 64 - answer["usage"]["prompt_tokens"]
        assert status == 200
        assert (await bench.chat(max_tokens=room))[0] == 200
        status, body, _ = await bench.chat(max_tokens=room + 1)
        assert status == 400
        assert "64 tokens" in body["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 3),
        ("chat_template", "{{ x }}"),
        ("continue_final_message", True),
        ("echo", True),
        ("kv_transfer_params", {"do_remote_decode": True}),
        ("prompt_logprobs", 1),
        ("truncate_prompt_tokens", 5),
        ("use_beam_search", True),
        ("add_generation_prompt", False),
        ("add_special_tokens", True),
    ],
)
async def test_what_cannot_work_is_refused_by_name(bench: Bench, field: str, value: Any) -> None:
    fields: dict[str, Any] = {field: value}
    status, body, _ = await bench.chat(**fields)
    assert (status, body["error"]["code"]) == (400, "unsupported_parameter")
    assert body["error"]["param"] == field
    assert nothing_was_computed(bench)


async def test_defaults_of_such_fields_are_no_obstacle(bench: Bench) -> None:
    status, _, _ = await bench.chat(
        best_of=2, n=2, echo=False, use_beam_search=False, prompt_logprobs=None, suffix=None
    )
    assert status == 200
    assert "best_of" not in bench.decode["alpha-0"].requests[0]


@pytest.mark.parametrize("n", [0, -1, 129, 1.5, "two", True])
async def test_n_must_be_a_sensible_number(bench: Bench, n: Any) -> None:
    status, body, _ = await bench.chat(n=n)
    assert (status, body["error"]["param"]) == (400, "n")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
            "messages[0].content[0].type",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
            "messages[0].content[0].type",
        ),
    ],
)
async def test_messages_that_are_no_text_conversation_are_refused(
    bench: Bench, messages: Any, param: str
) -> None:
    status, body, _ = await bench.chat(messages=messages)
    assert status == 400
    assert body["error"]["param"] == param
    assert nothing_was_computed(bench)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"5", b"\xff"])
async def test_a_body_that_is_no_json_object_is_a_400(bench: Bench, raw: bytes) -> None:
    async with bench.http.post(f"{bench.url}/v1/chat/completions", data=raw) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_session_id_that_is_too_long_is_a_400(bench: Bench) -> None:
    status, body, _ = await bench.chat(headers={"X-Session-ID": "x" * 256})
    assert (status, body["error"]["param"]) == (400, "x-session-id")


async def test_unknown_paths_and_methods_have_openai_bodies(bench: Bench) -> None:
    status, body = await bench.get("/v1/embeddings")
    assert (status, body["error"]["code"]) == (404, "not_found")
    status, body = await bench.get("/v1/chat/completions")
    assert (status, body["error"]["code"]) == (405, "method_not_allowed")


async def test_a_defect_of_the_router_is_a_500_and_leaks_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(type(bench.router.prompts), "tokens", broken)
    status, body, _ = await bench.chat()
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert "secret" not in str(body)


async def test_a_body_that_is_too_large_is_a_413(start: Start) -> None:
    async with start(settings={"router": {"max_body_mb": 1}}) as bench:
        large = io.BytesIO(b'{"model": "alpha", "prompt": "' + b"a " * 2**19 + b'"}')
        async with bench.http.post(f"{bench.url}/v1/completions", data=large) as response:
            body = await response.json()
            assert (response.status, body["error"]["code"]) == (413, "request_too_large")
        assert "max_body_mb" in body["error"]["message"]
        assert nothing_was_computed(bench)
