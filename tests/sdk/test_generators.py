"""`with session:` in generators, whose context variables leak to their readers."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import copy_context
from typing import Any

import pytest

from prefillshare_agents import (
    AsyncOpenAI,
    AsyncSession,
    OpenAI,
    Session,
    SessionLostWarning,
    _blocks,
    current_session,
)
from prefillshare_agents.testing import FakeServer

HELLO: Any = [{"role": "user", "content": "hello"}]
ASK: Any = {"model": "planner", "messages": HELLO}


@pytest.fixture
def client(server: FakeServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url, api_key="local") as made:
        yield made


@pytest.fixture
async def aclient(server: FakeServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=server.url, api_key="local") as made:
        yield made


def named(server: FakeServer) -> list[list[str]]:
    return [chat.sessions for chat in server.chats]


def name() -> str | None:
    session = current_session()
    return session.id if session is not None else None


def steps(client: OpenAI, session: str) -> Iterator[str]:
    with client.session(session):
        for _ in range(2):
            client.chat.completions.create(**ASK)
            yield session


async def asteps(client: AsyncOpenAI, session: str) -> AsyncIterator[str]:
    async with client.session(session):
        for _ in range(2):
            await client.chat.completions.create(**ASK)
            yield session


def test_generators_read_in_turns_keep_to_their_sessions(
    client: OpenAI, server: FakeServer
) -> None:
    read = [
        each for pair in zip(steps(client, "a"), steps(client, "b"), strict=True) for each in pair
    ]

    assert named(server) == [[each] for each in read] == [["a"], ["b"], ["a"], ["b"]]


async def test_async_generators_read_in_turns_keep_to_their_sessions(
    aclient: AsyncOpenAI, server: FakeServer
) -> None:
    first, second = asteps(aclient, "a"), asteps(aclient, "b")
    for _ in range(2):
        await anext(first)
        await anext(second)

    assert named(server) == [["a"], ["b"], ["a"], ["b"]]
    for generator in (first, second):
        assert [each async for each in generator] == []


def test_a_generators_reader_is_not_in_its_block(client: OpenAI, server: FakeServer) -> None:
    for _ in steps(client, "inside"):
        client.chat.completions.create(**ASK)
    with client.session("reader"):
        for _ in steps(client, "inside"):
            client.chat.completions.create(**ASK)

    assert named(server) == [["inside"], [], ["inside"], [], *[["inside"], ["reader"]] * 2]


async def test_an_async_generators_reader_is_not_in_its_block(
    aclient: AsyncOpenAI, server: FakeServer
) -> None:
    async for _ in asteps(aclient, "inside"):
        await aclient.chat.completions.create(**ASK)

    assert named(server) == [["inside"], [], ["inside"], []]


def test_a_generator_that_is_stepped_in_new_contexts_keeps_its_session(
    client: OpenAI, server: FakeServer
) -> None:
    """As Starlette reads it in worker threads."""
    generator = steps(client, "a")
    for _ in range(3):
        step = threading.Thread(target=copy_context().run, args=(next, generator, None))
        step.start()
        step.join()

    assert named(server) == [["a"], ["a"]]
    assert name() is None


async def test_an_async_generator_that_is_stepped_in_new_tasks_keeps_its_session(
    aclient: AsyncOpenAI, server: FakeServer
) -> None:
    generator = asteps(aclient, "a")

    async def step() -> None:
        await anext(generator)

    for _ in range(2):
        await asyncio.create_task(step())
    await generator.aclose()  # type: ignore[attr-defined]

    assert named(server) == [["a"], ["a"]]


def test_a_block_around_a_lost_one_does_not_take_its_calls(
    client: OpenAI, server: FakeServer
) -> None:
    with client.session("outer"):
        generator = steps(client, "inner")
        for _ in range(2):
            copy_context().run(next, generator)

    assert named(server) == [["inner"], ["inner"]]


def test_blocks_inside_the_generator_come_first(client: OpenAI) -> None:
    def generator() -> Iterator[str | None]:
        with client.session("outer"):
            with client.session("inner"):
                yield name()
                yield name()
            yield name()

    assert list(generator()) == ["inner", "inner", "outer"]


@contextlib.contextmanager
def conversation(session: str) -> Iterator[None]:
    with Session(session):
        yield


@contextlib.asynccontextmanager
async def aconversation(session: str) -> AsyncIterator[None]:
    async with AsyncSession(session):
        yield


def test_a_context_manager_may_be_written_as_a_generator() -> None:
    def generator(session: str) -> Iterator[str | None]:
        with conversation(session):
            yield name()
            yield name()

    with conversation("a"), contextlib.ExitStack() as stack:
        assert name() == "a"
        stack.enter_context(conversation("b"))
        assert name() == "b"
        assert list(zip(generator("c"), generator("d"), strict=True)) == [("c", "d")] * 2
    assert name() is None


async def test_an_async_context_manager_may_be_written_as_a_generator() -> None:
    async def generator(session: str) -> AsyncIterator[str | None]:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(aconversation(session))
            yield name()
            yield name()

    async with aconversation("a"):
        first, second = generator("c"), generator("d")
        assert [await anext(first), await anext(second), await anext(first)] == ["c", "d", "c"]
        assert name() == "a"
        assert [each async for each in second] == ["d"]
        assert [each async for each in first] == []
    assert name() is None


@pytest.fixture
def of_a_fixture() -> Iterator[Session]:
    with Session("of a fixture") as session:
        yield session


def test_a_fixtures_block_is_around_the_test(of_a_fixture: Session) -> None:
    assert current_session() is of_a_fixture


async def test_tasks_that_a_generator_starts_belong_to_its_session(
    aclient: AsyncOpenAI, server: FakeServer
) -> None:
    async def generator() -> AsyncIterator[Any]:
        async with aclient.session("a"):
            create = aclient.chat.completions.create
            yield await asyncio.gather(create(**ASK), create(**ASK))

    assert [len(answers) async for answers in generator()] == [2]
    assert named(server) == [["a"], ["a"]]


def test_a_thread_that_may_belong_to_a_suspended_generator_has_no_session() -> None:
    def generator() -> Iterator[None]:
        with Session("a"):
            yield

    seen: list[str | None] = []

    def work() -> None:
        with pytest.warns(SessionLostWarning, match=r"session 'a'.*with_options\(session="):
            seen.append(name())

    held = generator()
    next(held)
    thread = threading.Thread(target=copy_context().run, args=(work,))
    thread.start()
    thread.join()
    held.close()  # type: ignore[attr-defined]

    assert seen == [None]


async def test_a_task_beside_two_generators_blocks_has_no_session() -> None:
    async def generator(session: str) -> AsyncIterator[str | None]:
        async with AsyncSession(session):
            yield name()

            async def task() -> str | None:
                with pytest.warns(SessionLostWarning):
                    return name()

            yield await asyncio.create_task(task())

    first, second = generator("a"), generator("b")
    assert [await anext(first), await anext(second)] == ["a", "b"]
    assert [await anext(first), await anext(second)] == [None, None]
    for each in (first, second):
        await each.aclose()  # type: ignore[attr-defined]


def test_a_generator_that_is_dropped_leaves_nothing_behind(client: OpenAI) -> None:
    generator = steps(client, "a")
    next(generator)
    del generator

    assert name() is None
    assert not _blocks._in_generators
