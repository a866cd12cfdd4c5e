"""Calls of asynchronous programs, cancellation among them; see calls.py."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import openai

from prefillshare_agents.testing import FakeServer

from .calls import HELLO, TOOLS, Reply

AsyncCall = Callable[[openai.AsyncOpenAI, FakeServer], Awaitable[Any]]


async def acreate(client: Any, **options: Any) -> Any:
    return await client.chat.completions.create(
        **{"model": "planner", "messages": HELLO, **options}
    )


async def plain(client: openai.AsyncOpenAI, server: FakeServer) -> Any:
    return await acreate(client)


async def streamed(client: openai.AsyncOpenAI, server: FakeServer) -> Any:
    return [chunk async for chunk in await acreate(client, stream=True)]


async def the_stream_helper(client: openai.AsyncOpenAI, server: FakeServer) -> Any:
    async with client.chat.completions.stream(model="planner", messages=HELLO) as stream:
        events = [event.type async for event in stream]
        return events, await stream.get_final_completion()


async def parsed(client: openai.AsyncOpenAI, server: FakeServer) -> Any:
    server.script('{"answer": 42}')
    return await client.chat.completions.parse(
        model="planner", messages=HELLO, response_format=Reply
    )


async def with_tools(client: openai.AsyncOpenAI, server: FakeServer) -> Any:
    return await acreate(client, tools=TOOLS)


async def a_raw_response(client: openai.AsyncOpenAI, server: FakeServer) -> Any:
    raw = await client.chat.completions.with_raw_response.create(model="planner", messages=HELLO)
    return raw.status_code, raw.parse()


async def a_refusal(client: openai.AsyncOpenAI, server: FakeServer) -> Any:
    server.fail(400)
    return await acreate(client)


async def a_retry_that_helps(client: openai.AsyncOpenAI, server: FakeServer) -> Any:
    server.fail(500)
    return await acreate(client)


async def several_at_once(client: openai.AsyncOpenAI, server: FakeServer) -> Any:
    return len(await asyncio.gather(*(acreate(client) for _ in range(4))))


async def a_call_that_is_cancelled(client: openai.AsyncOpenAI, server: FakeServer) -> Any:
    held = threading.Event()
    server.delay(held)
    call = asyncio.create_task(acreate(client))
    await asyncio.to_thread(server.wait_for_chats, 1, 60)
    call.cancel()
    ended = await asyncio.gather(call, return_exceptions=True)
    held.set()
    return type(ended[0]).__name__, await acreate(client)


async def a_stream_that_is_cancelled(client: openai.AsyncOpenAI, server: FakeServer) -> Any:
    held = threading.Event()
    server.delay(held, after=1)
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in await acreate(client, stream=True):
            begun.set()

    reading = asyncio.create_task(read())
    async with asyncio.timeout(60):
        await begun.wait()
    reading.cancel()
    ended = await asyncio.gather(reading, return_exceptions=True)
    held.set()
    return type(ended[0]).__name__, await acreate(client)


ASYNC_CALLS: list[AsyncCall] = [
    plain,
    streamed,
    the_stream_helper,
    parsed,
    with_tools,
    a_raw_response,
    a_refusal,
    a_retry_that_helps,
    several_at_once,
    a_call_that_is_cancelled,
    a_stream_that_is_cancelled,
]
