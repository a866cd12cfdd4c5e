"""`FakeServer` of the SDK gives what the router gives: this is what keeps the fake honest.

Each case sends the same requests to both. Their answers must have the same status, fields, types
and events, and errors the same words. Fields that are null in a worker's answer are left out, for
the mock workers send fewer of them than vLLM does.
"""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import aiohttp
import pytest
from yarl import URL

from prefillshare_agents.testing import FakeServer, tool_call
from tests.mocks.mock_workers import MAX_MODEL_LEN
from tests.router.conftest import Bench, Start

CHAT = "/v1/chat/completions"
ASK = {"role": "user", "content": "a question"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SESSION = {"X-Session-ID": "s1"}
EXACT = ("prefillshare", "error", "break")
"""Objects of the router's own: their nulls count."""


@dataclass(frozen=True)
class Send:
    """One request."""

    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    path: str = CHAT


def chat(headers: dict[str, str] | None = None, **fields: Any) -> Send:
    body = {"model": "alpha", "messages": [ASK], **fields}
    return Send({key: value for key, value in body.items() if value is not ...}, headers or {})


def get(path: str, method: str = "GET") -> Send:
    return Send(None, {}, method, path)


def stream(headers: dict[str, str] | None = None, **fields: Any) -> Send:
    return chat(headers, stream=True, **fields)


def prefill(headers: dict[str, str] | None = None, **fields: Any) -> Send:
    body = {"messages": [ASK], **fields}
    sent = {key: value for key, value in body.items() if value is not ...}
    return Send(sent, headers or {}, path="/v1/sessions/s1/prefill")


def tokenize(**fields: Any) -> Send:
    return Send({"model": "alpha", **fields}, path="/tokenize")


CALLS = get("/v1/sessions/s1/calls")
GROWN = [ASK, {"role": "assistant", "content": "alpha says yes"}, ASK]
EDITED = [{"role": "user", "content": "a questiön"}, *GROWN[1:]]
ESSAY = "Cars bring noise and smoke, and take the room of trees and people."
TURNED = [ASK, {"role": "user", "content": ESSAY}]
OTHER = {"role": "user", "content": "a questiön"}
STRICT = {**SESSION, "X-PrefillShare-Strict": "true"}
ISOLATE = {**SESSION, "X-PrefillShare-Mode": "isolate"}
HEAD = {"role": "system", "content": "Be brief."}
CASES: dict[str, list[Send]] = {
    "a call without a session": [chat()],
    "a session": [chat(SESSION), chat(SESSION, model="beta", messages=GROWN)],
    "a stream": [stream(SESSION)],
    "a stream with usage": [stream(SESSION, stream_options={"include_usage": True})],
    "choices": [chat(SESSION, n=2)],
    "streamed choices": [stream(n=2, stream_options={"include_usage": True})],
    "instructions and tools": [
        chat(SESSION, messages=[{"role": "system", "content": "Be brief."}, ASK], tools=[TOOL])
    ],
    "a request id": [chat({"X-Request-Id": "mine"}), stream({"X-Request-Id": "mine"})],
    "text parts": [chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}])],
    "header X-PrefillShare-Session": [chat({"X-PrefillShare-Session": "s1"})],
    "body session_id": [chat(session_id="s1")],
    "header X-Session-Affinity": [chat({"X-Session-Affinity": "s1"}, prompt_cache_key="other")],
    "body prompt_cache_key": [chat(prompt_cache_key="s1", metadata={"session_id": "other"})],
    "body metadata.session_id": [chat(metadata={"session_id": "s1"})],
    "an empty session header": [chat({"X-Session-ID": ""}, session_id="s1")],
    "a child": [chat(SESSION), chat({"X-Session-ID": "s2", "X-Parent-Session-ID": "s1"})],
    "a final call": [
        chat(SESSION),
        chat({**SESSION, "X-Session-Final": "true"}),
        get("/v1/sessions/s1"),
    ],
    "totals": [chat(SESSION), get("/v1/sessions/s1")],
    "ending a session": [
        chat(SESSION),
        get("/v1/sessions/s1", "DELETE"),
        get("/v1/sessions/s1"),
        get("/v1/sessions/s1", "DELETE"),
    ],
    "a session id that is quoted": [chat({"X-Session-ID": "a/b c"}), get("/v1/sessions/a%2Fb%20c")],
    "models": [get("/v1/models")],
    "one model": [get(f"/v1/models/{name}") for name in ("alpha", "base", "gamma")],
    "a model's wrong method": [get("/v1/models/alpha", "DELETE")],
    "live": [get("/live")],
    "an unknown path": [get("/v1/embeddings")],
    "a wrong method": [get(CHAT), get("/v1/sessions/s1", "PUT")],
    "an unknown role": [chat(model="gamma")],
    "the base": [chat(model="base")],
    "no model": [chat(model=...)],
    "no messages": [chat(messages=...), chat(messages=[]), chat(messages="hello")],
    "messages that are none": [
        chat(messages=["hello"]),
        chat(messages=[{"content": "a"}]),
        chat(messages=[{"role": "user", "content": 5}]),
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        chat(messages=[ASK, {"role": "assistant", "tool_calls": [{"id": "c1"}]}]),
    ],
    "tools that are no list": [chat(tools={"a": 1})],
    "too many choices": [chat(n=1000), chat(n="two"), chat(n=True)],
    "no new tokens": [chat(max_tokens=0), chat(max_completion_tokens=0)],
    "flags that are none": [chat(stream="yes"), chat(stream_options=[])],
    "fields that cannot work": [
        chat(best_of=3),
        chat(chat_template="{{ x }}"),
        chat(continue_final_message=True),
        chat(echo=True),
        chat(kv_transfer_params={"a": 1}),
        chat(prompt_logprobs=0),
        chat(suffix="x"),
        chat(truncate_prompt_tokens=5),
        chat(use_beam_search=True),
        chat(add_generation_prompt=False),
        chat(add_special_tokens=True),
    ],
    "defaults of such fields": [chat(best_of=2, n=2, echo=False, suffix=None)],
    "no JSON": [Send(b"{"), Send(b"[]"), Send(b"")],
    "a session id that is too long": [chat({"X-Session-ID": "x" * 256})],
    "session ids that are no text": [chat(session_id=5), chat(prompt_cache_key="é")],
    "a break": [chat(SESSION, messages=GROWN), chat(SESSION, messages=EDITED), CALLS],
    "a break in a stream": [chat(SESSION, messages=GROWN), stream(SESSION, messages=EDITED)],
    "a break that is refused": [
        chat(SESSION, messages=GROWN),
        chat(STRICT, messages=EDITED),
        chat(STRICT, messages=GROWN),
    ],
    "text that was another role's": [
        chat(SESSION, messages=TURNED),
        chat(SESSION, messages=[ASK, {**TURNED[1], "role": "assistant"}, ASK], model="beta"),
        CALLS,
    ],
    "another task that is strict": [chat(STRICT), chat(STRICT, messages=[OTHER]), CALLS],
    "another task to prefill ahead": [prefill(STRICT), prefill(STRICT, messages=[OTHER])],
    "roles kept apart": [chat(SESSION), chat(ISOLATE, model="beta", messages=GROWN), CALLS],
    "salts that are none": [
        chat(ISOLATE, cache_salt=5),
        chat(ISOLATE, cache_salt=""),
        prefill(ISOLATE, cache_salt=""),
    ],
    "template variables that are none": [
        chat(chat_template_kwargs=[1]),
        prefill(chat_template_kwargs="x"),
    ],
    "a prefill of a context that is too long": [
        prefill(messages=[{"role": "user", "content": "é " * 4000}], wait=True)
    ],
    "words that are no mode": [
        chat({"X-PrefillShare-Mode": "both"}),
        chat({"X-PrefillShare-Strict": "maybe"}),
    ],
    "calls of a session that is unknown": [CALLS],
    "a prefill ahead": [prefill(wait=True), chat(SESSION), get("/v1/sessions/s1"), CALLS],
    "a prefill ahead that nobody waits for": [prefill(), prefill(wait=False)],
    "a prefill ahead that breaks": [
        chat(SESSION, messages=GROWN),
        prefill(messages=EDITED, wait=True),
        prefill(STRICT, messages=EDITED),
    ],
    "a prefill ahead that cannot be": [
        prefill(messages=...),
        prefill(messages=[]),
        prefill(messages=[HEAD, ASK]),
        prefill(messages=[{"role": "user", "content": 5}]),
        prefill(tools=[TOOL]),
        prefill(wait="yes"),
        prefill(ISOLATE),
        get("/v1/sessions/s1"),
    ],
    "tokens": [
        tokenize(messages=[HEAD, ASK], tools=[TOOL]),
        tokenize(prompt="a question"),
        tokenize(prompt="a question", return_token_strs=True),
    ],
    "tokens of nothing": [
        tokenize(),
        tokenize(messages=[]),
        tokenize(prompt="a", model="gamma"),
        tokenize(prompt="a", return_token_strs="yes"),
    ],
    "a context that is too long": [chat(messages=[{"role": "user", "content": "é " * 4000}])],
    "too many new tokens": [chat(max_completion_tokens=MAX_MODEL_LEN)],
}


@pytest.fixture
async def fake() -> AsyncIterator[FakeServer]:
    with FakeServer(["alpha", "beta"], max_model_len=MAX_MODEL_LEN) as server:
        server.script("alpha", lambda _: "alpha says yes")
        server.script("beta", lambda _: "beta says yes")
        yield server


@pytest.mark.parametrize("case", CASES)
async def test_the_fake_server_answers_as_the_router_does(
    case: str, bench: Bench, fake: FakeServer
) -> None:
    for request in CASES[case]:
        real = await answered(bench.http, bench.url, request)
        assert await answered(bench.http, fake.url.removesuffix("/v1"), request) == real, request


KEPT_APART = [
    chat({**ISOLATE, "X-Session-ID": "i1"}),
    chat({**ISOLATE, "X-Session-ID": "i2"}),
    chat({**ISOLATE, "X-Session-ID": "i1"}, model="beta"),
    chat({**ISOLATE, "X-Session-ID": "i1"}),
    chat({**ISOLATE, "X-Session-ID": "i1"}, cache_salt="x"),
    chat(cache_salt="x"),
    chat(cache_salt="x", model="beta"),
    chat(cache_salt="y"),
    chat(),
]


async def test_the_fake_server_keeps_apart_what_the_router_keeps_apart(
    bench: Bench, fake: FakeServer
) -> None:
    async def found(url: str, request: Send) -> bool:
        body = {**request.body, "messages": [{"role": "user", "content": "some words and " * 30}]}
        async with bench.http.post(url + CHAT, json=body, headers=request.headers) as response:
            return bool((await response.json())["prefillshare"]["cached_tokens"])

    real = [await found(bench.url, request) for request in KEPT_APART]
    assert [await found(fake.url.removesuffix("/v1"), request) for request in KEPT_APART] == real


async def test_both_refuse_to_prefill_for_all_roles_what_stands_behind_a_head(
    start: Start,
) -> None:
    """`messages` of a role's own stand first there."""
    with FakeServer(["alpha", "beta"], layout="model") as fake:
        async with start(settings={"layout": {"kind": "model"}}) as bench:
            for request in (prefill(), prefill(wait="yes"), get("/v1/sessions/s1")):
                real = await answered(bench.http, bench.url, request)
                assert real["status"] == (404 if request.method == "GET" else 400)
                assert await answered(bench.http, fake.url.removesuffix("/v1"), request) == real


@pytest.mark.parametrize(("layout", "told"), [("context_first", True), ("model", False)])
async def test_both_tell_a_role_who_answered_only_where_they_lay_out_the_prompt(
    start: Start, layout: Any, told: bool
) -> None:
    kind = layout.replace("_", "-")
    named = {**GROWN[1], "name": "beta"}
    with FakeServer(["alpha", "beta"], layout=layout) as fake:
        async with start(settings={"layout": {"kind": kind}}) as bench:
            for url in (bench.url, fake.url.removesuffix("/v1")):
                counts = []
                for answer in (GROWN[1], named):
                    body = {"model": "alpha", "messages": [ASK, answer, ASK]}
                    async with bench.http.post(f"{url}/tokenize", json=body) as response:
                        counts.append((await response.json())["count"])
                assert (counts[1] > counts[0]) == told


async def test_the_fake_servers_tool_calls_are_those_of_a_worker(
    bench: Bench, fake: FakeServer
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    bench.decode["alpha-0"].tool_calls = [call]
    fake.script("alpha", lambda _: tool_call("weather"))
    real = await answered(bench.http, bench.url, chat(tools=[TOOL]))
    assert await answered(bench.http, fake.url.removesuffix("/v1"), chat(tools=[TOOL])) == real


async def answered(http: aiohttp.ClientSession, url: str, request: Send) -> Any:
    """What both servers must agree on."""
    data = request.body if isinstance(request.body, bytes) else None
    json_body = None if isinstance(request.body, bytes) else request.body
    async with http.request(
        request.method,
        URL(url + request.path, encoded=True),
        json=json_body,
        data=data,
        headers=request.headers,
    ) as response:
        text = await response.text()
        named = {name.lower() for name in response.headers}
        kind = response.headers["Content-Type"]
        found = {
            "status": response.status,
            "kind": kind,
            "headers": sorted(n for n in named if n.startswith(("x-", "retry", "allow"))),
        }
    if kind.startswith("text/event-stream"):
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        shapes = [event if event == "[DONE]" else shape(json.loads(event)) for event in events]
        # In how many pieces answers come, and how those of several interleave, is left open.
        return {**found, "events": [e for i, e in enumerate(shapes) if e not in shapes[:i]]}
    return {**found, "body": shape(json.loads(text))}


def shape(value: Any, name: str = "") -> Any:
    """Fields and types of a JSON value; words of errors and other names as they are."""
    if isinstance(value, dict):
        return {
            key: shape(item, key)
            for key, item in sorted(value.items())
            if item is not None or name in EXACT
        }
    if isinstance(value, list):
        return [key for key, _ in groupby(shape(item, name) for item in value)]
    if name == "message":
        return re.sub(r"\d+", "#", re.sub(r"not JSON: .*", "not JSON", value))
    if name in ("code", "param", "type", "object", "role", "model", "affinity", "parent", "kind"):
        return value
    return type(value).__name__
