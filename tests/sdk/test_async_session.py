"""`AsyncSession`: the same session for asyncio programs."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from prefillshare_agents import (
    AsyncChatStream,
    AsyncOpenAI,
    AsyncSession,
    ChatStream,
    OpenAI,
    Session,
    current_session,
)
from prefillshare_agents.testing import FakeServer

TASK: Any = {"role": "user", "content": "How far is the moon?"}


@pytest.fixture
async def session(server: FakeServer) -> AsyncIterator[AsyncSession]:
    made = AsyncSession("s1", base_url=server.url, messages=[TASK])
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("asynchronous", "synchronous"),
    [(AsyncSession, Session), (AsyncOpenAI, OpenAI), (AsyncChatStream, ChatStream)],
)
def test_both_twins_have_the_same_surface(asynchronous: type, synchronous: type) -> None:
    twins = {
        "__aenter__": "__enter__",
        "__aexit__": "__exit__",
        "__aiter__": "__iter__",
        "__anext__": "__next__",
        "aclose": "close",  # of openai's own clients
    }

    def surface(kind: type) -> dict[str, list[str]]:
        return {
            twins.get(name, name): list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(kind, inspect.isroutine)
            if not name.startswith("_") or name in twins or name in twins.values()
            if member.__module__.startswith("prefillshare_agents")
        }

    assert surface(asynchronous) == surface(synchronous) != {}


async def test_answers_join_the_context_in_both_modes(
    session: AsyncSession, server: FakeServer
) -> None:
    server.script(["one", "two"])
    await session.chat("planner", instructions="Plan.")
    async for _ in await session.chat("critic", stream=True):
        pass

    assert [item["content"] for item in session.messages] == [TASK["content"], "one", "two"]
    assert [call.affinity for call in session.calls] == ["new", "hit"]
    assert server.chats[0].body["messages"][0] == {"role": "system", "content": "Plan."}


async def test_a_closed_stream_leaves_the_context_as_it_was(session: AsyncSession) -> None:
    async with await session.chat("solver", stream=True) as stream:
        await anext(stream)

    assert session.messages == (TASK,)


async def test_a_stream_that_is_cut_short_raises_and_is_not_kept(
    session: AsyncSession, server: FakeServer
) -> None:
    server.cut_stream()

    with pytest.raises(openai.OpenAIError, match="finish_reason"):
        async for _ in await session.chat("solver", stream=True):
            pass
    assert session.messages == (TASK,)


async def test_totals_and_close_speak_to_the_server(
    session: AsyncSession, server: FakeServer
) -> None:
    await session.chat("planner")
    assert (await session.totals()).calls == 1
    await session.close()

    assert server.sessions == {}
    with pytest.raises(RuntimeError, match="closed"):
        await session.chat("planner")


async def test_tasks_do_not_see_each_others_session(server: FakeServer) -> None:
    async with AsyncOpenAI(base_url=server.url, api_key="local") as client:

        async def work(name: str) -> None:
            async with AsyncSession(name):
                await asyncio.sleep(0)
                message: Any = {"role": "user", "content": name}
                await client.chat.completions.create(model="planner", messages=[message])

        await asyncio.gather(*(work(f"s{i}") for i in range(8)))

    assert len(server.chats) == 8
    for chat in server.chats:
        assert chat.sessions == [chat.body["messages"][0]["content"]]
    assert current_session() is None
