"""What is asynchronous never waits for a socket on the thread of the event loop."""

import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic import BaseModel

from prefillshare_agents import AsyncOpenAI, AsyncSession
from prefillshare_agents.langgraph import Team
from prefillshare_agents.testing import FakeServer

LONG: Any = {"role": "user", "content": "far " * 900}
STATE: Any = {"messages": [("user", "far " * 900)]}


class Waited(Exception):
    """A blocking call on the loop's thread."""


@contextmanager
def no_waiting() -> Iterator[None]:
    """Sockets of this thread may only be used without waiting, as an event loop does."""
    mine = threading.get_ident()

    def checked(name: str) -> Callable[..., Any]:
        original = getattr(socket.socket, name)

        def call(self: socket.socket, *args: Any, **options: Any) -> Any:
            if threading.get_ident() == mine and self.gettimeout() != 0:
                raise Waited(name)
            return original(self, *args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "recv", "recv_into", "send", "sendall"):
            patch.setattr(socket.socket, name, checked(name))
        yield


class Far(BaseModel):
    km: int


async def create(session: AsyncSession, client: AsyncOpenAI, team: Team) -> None:
    async with session:
        await client.chat.completions.create(model="planner", messages=[LONG])


async def parse(session: AsyncSession, client: AsyncOpenAI, team: Team) -> None:
    async with session:
        await client.chat.completions.parse(
            model="planner", messages=[LONG], response_format=Far, max_tokens=20
        )


async def stream(session: AsyncSession, client: AsyncOpenAI, team: Team) -> None:
    async with session, client.chat.completions.stream(model="planner", messages=[LONG]) as events:
        async for _ in events:
            pass


async def chat(session: AsyncSession, client: AsyncOpenAI, team: Team) -> None:
    await session.chat("planner")
    async for _ in await session.chat("critic", stream=True):
        pass


async def ask(session: AsyncSession, client: AsyncOpenAI, team: Team) -> None:
    await session.chat("planner")
    await session.count_tokens("planner")
    await session.prefill()
    await session.totals()
    await session.explain()
    await session.fork().chat("critic")


async def model(session: AsyncSession, client: AsyncOpenAI, team: Team) -> None:
    async with session:
        await team.model("planner").ainvoke([LONG])
        async for _ in team.model("critic").astream([LONG]):
            pass


async def node(session: AsyncSession, client: AsyncOpenAI, team: Team) -> None:
    async with session:
        await team.node("planner").ainvoke(STATE)


async def agent(session: AsyncSession, client: AsyncOpenAI, team: Team) -> None:
    async with session:
        await team.agent("planner", instructions="Plan.").ainvoke(STATE)


Use = Callable[[AsyncSession, AsyncOpenAI, Team], Awaitable[None]]


@pytest.mark.parametrize("use", [create, parse, stream, chat, ask, model, node, agent])
async def test_no_call_waits_on_the_event_loop(use: Use, server: FakeServer) -> None:
    server.script(lambda request: '{"km": 1}')
    team = Team(server.url, ["planner", "critic"])
    async with AsyncOpenAI(base_url=server.url, api_key="local") as client:
        session = AsyncSession(client=client, messages=[LONG], token_budget=100_000)
        with no_waiting():
            await use(session, client, team)
            await session.close()
    await team.aclose()
    assert server.chats


async def test_a_call_that_waits_is_found() -> None:
    with socket.socket() as waiting, no_waiting(), pytest.raises(Waited):
        waiting.connect(("127.0.0.1", 9))
