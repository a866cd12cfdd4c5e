"""The same calls by openai's client and by ours: the same results but for the session header."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from prefillshare_agents import AsyncOpenAI, AsyncSession, OpenAI, Session
from prefillshare_agents.testing import FakeServer

from .acalls import ASYNC_CALLS, AsyncCall
from .calls import CALLS, Call

# What differs from one run to the next with the same client.
VOLATILE_FIELDS = ("id", "created", "request_id", "_request_id", "prefillshare")
VOLATILE_HEADERS = ("host", "x-stainless-async", "idempotency-key")


def plainly(value: Any) -> Any:
    """`value` as nested plain data, without what differs between two runs."""
    if isinstance(value, BaseModel):
        return type(value).__name__, plainly(value.model_dump(mode="json", warnings=False))
    if isinstance(value, dict):
        return {key: plainly(item) for key, item in value.items() if key not in VOLATILE_FIELDS}
    if isinstance(value, list | tuple):
        return [plainly(item) for item in value]
    return value


def outcome(call: Call, client: openai.OpenAI, server: FakeServer) -> Any:
    try:
        return plainly(call(client, server))
    except Exception as error:
        return told(error)


async def aoutcome(call: AsyncCall, client: openai.AsyncOpenAI, server: FakeServer) -> Any:
    try:
        return plainly(await call(client, server))
    except Exception as error:
        return told(error)


def told(error: Exception) -> Any:
    """What a program can see of an error."""
    status = getattr(error, "status_code", None), getattr(error, "code", None)
    body = plainly(getattr(error, "body", None))
    cause = type(error.__cause__).__name__
    return type(error).__mro__[:-2], str(error).split(" at 0x")[0], status, body, cause


def seen(server: FakeServer) -> list[Any]:
    return [
        (
            item.method,
            item.path,
            sorted(pair for pair in item.headers if pair[0] not in VOLATILE_HEADERS),
            item.body,
        )
        for item in server.requests
    ]


def test_there_are_at_least_forty_calls() -> None:
    assert len({call.__name__ for call in CALLS}) == len(CALLS) >= 40


@pytest.mark.parametrize("named", [str, Session], ids=["id", "object"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_call_has_the_same_outcome_and_sends_the_same(call: Call, named: Any) -> None:
    outcomes, requests = [], []
    for make in (openai.OpenAI, OpenAI):
        options: Any = {} if make is openai.OpenAI else {"session": named("parity")}
        with FakeServer() as server:
            with make(base_url=server.url, api_key="local", **options) as client:
                outcomes.append(outcome(call, client, server))
            requests.append(seen(server))
            outcomes[-1] = _without(server.url, outcomes[-1])

    require_same(outcomes, requests)


@pytest.mark.parametrize("named", [str, AsyncSession], ids=["id", "object"])
@pytest.mark.parametrize("call", ASYNC_CALLS, ids=lambda call: call.__name__)
async def test_an_asynchronous_call_does_so_too(call: AsyncCall, named: Any) -> None:
    outcomes, requests = [], []
    for make in (openai.AsyncOpenAI, AsyncOpenAI):
        options: Any = {} if make is openai.AsyncOpenAI else {"session": named("parity")}
        with FakeServer() as server:
            async with make(base_url=server.url, api_key="local", **options) as client:
                found = await aoutcome(call, client, server)
            requests.append(seen(server))
            outcomes.append(_without(server.url, found))
    require_same(outcomes, requests)


def require_same(outcomes: list[Any], requests: list[list[Any]]) -> None:
    """Raise AssertionError unless only the session header differs: openai's first, then ours."""
    theirs, ours = requests
    tagged = [
        (method, path, [pair for pair in headers if pair != ("x-session-id", "parity")], body)
        for method, path, headers, body in ours
    ]
    assert outcomes[1] == outcomes[0]
    assert tagged == theirs
    assert all(("x-session-id", "parity") in headers for _, _, headers, _ in ours)


def _without(url: str, value: Any) -> Any:
    """`value` without the server's port, which is another one each time."""
    if isinstance(value, str):
        return value.replace(url, "URL")
    if isinstance(value, list | tuple):
        return [_without(url, item) for item in value]
    return value
