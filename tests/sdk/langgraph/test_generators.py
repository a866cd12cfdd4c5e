"""Graphs whose streams are read in a generator, inside its `with session:`."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import copy_context
from itertools import chain
from typing import Any

import pytest
from langchain_core.runnables import RunnablePassthrough
from langgraph.graph import START, MessagesState, StateGraph

from prefillshare_agents import Session, SessionLostWarning
from prefillshare_agents.langgraph import Team
from prefillshare_agents.testing import FakeServer

TASK: Any = {"messages": [("user", "How far is the moon?")]}
MODES = ["updates", "messages"]


def graph(team: Team) -> Any:
    built = StateGraph(MessagesState)
    for left, right in [(START, "planner"), ("planner", "critic")]:
        built.add_node(right, team.node(right))
        built.add_edge(left, right)
    return built.compile()


def body(team: Team, app: Any, session: str, mode: str = "updates") -> Iterator[Any]:
    with team.session(session):
        yield "begun"
        yield from app.stream(TASK, stream_mode=mode)
        yield from app.stream(TASK, stream_mode=mode)


async def abody(team: Team, app: Any, session: str, mode: str = "updates") -> AsyncIterator[Any]:
    async with team.asession(session):
        yield "begun"
        for _ in range(2):
            async for part in app.astream(TASK, stream_mode=mode):
                yield part


def named(server: FakeServer) -> list[list[str]]:
    return [chat.sessions for chat in server.chats]


@pytest.mark.parametrize("mode", MODES)
def test_streams_read_in_turns_keep_to_their_sessions(
    mode: str, team: Team, server: FakeServer
) -> None:
    app = graph(team)
    read = [body(team, app, session, mode) for session in ("a", "b")]
    for _ in zip(*read, strict=True):
        team.model("solver").invoke("The reader's own.")

    of = {role: [c.sessions for c in server.chats if c.role == role] for role in team.roles}
    assert sorted(of["planner"] + of["critic"]) == [["a"]] * 4 + [["b"]] * 4
    assert {str(sessions) for sessions in of["solver"]} == {"[]"}


@pytest.mark.parametrize("mode", MODES)
async def test_async_streams_read_in_turns_keep_to_their_sessions(
    mode: str, team: Team, server: FakeServer
) -> None:
    app = graph(team)
    read: list[AsyncIterator[Any]] = [abody(team, app, session, mode) for session in ("a", "b")]
    while read:
        for each in list(read):
            if await anext(each, None) is None:
                read.remove(each)
    await team.aclose()

    assert sorted(named(server)) == [["a"]] * 4 + [["b"]] * 4


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_read_in_new_contexts_keeps_its_session(
    mode: str, team: Team, server: FakeServer
) -> None:
    """As Starlette reads it in worker threads."""
    parts, seen = body(team, graph(team), "a", mode), []

    def step() -> None:
        seen.append(next(parts, None))

    while not seen or seen[-1] is not None:
        thread = threading.Thread(target=copy_context().run, args=(step,))
        thread.start()
        thread.join()

    assert named(server) == [["a"]] * 4


async def test_a_run_that_goes_on_while_its_reader_is_away_keeps_its_session(
    team: Team, server: FakeServer
) -> None:
    again = asyncio.Event()
    model: Any = team.model("critic")

    async def node(state: Any) -> Any:
        await model.ainvoke(state["messages"])
        await again.wait()
        return {"messages": [await model.ainvoke(state["messages"])]}

    built = StateGraph(MessagesState)
    built.add_node("critic", node)
    built.add_edge(START, "critic")
    parts = abody(team, built.compile(), "a", "messages")
    await anext(parts)
    await anext(parts)  # The first call's first token.
    again.set()
    await asyncio.to_thread(server.wait_for_chats, 2, 60)
    assert [part async for part in parts]
    await team.aclose()

    assert named(server) == [["a"]] * 4


def test_a_block_in_a_node_comes_before_that_of_the_run(team: Team, server: FakeServer) -> None:
    model = team.model("critic")
    inner = graph(team)

    def node(state: Any) -> Any:
        with team.session("node"):
            inner.invoke(state)
        return {"messages": [model.invoke(state["messages"])]}

    built = StateGraph(MessagesState)
    built.add_node("critic", node)
    built.add_edge(START, "critic")
    with team.session("run"):
        built.compile().invoke(TASK)

    assert named(server) == [["node"], ["node"], ["run"]]


def test_a_stream_begun_in_the_block_may_be_read_on_after_it(
    team: Team, server: FakeServer
) -> None:
    with team.session("a"):
        parts = graph(team).stream(TASK)
        next(parts)
    with team.session("b"):
        list(parts)

    assert named(server) == [["a"], ["a"]]


def test_a_chains_stream_begun_in_the_block_keeps_the_session(
    team: Team, server: FakeServer
) -> None:
    def parts(session: str) -> Iterator[Any]:
        with team.session(session):
            yield "begun"
            steps: Any = RunnablePassthrough() | team.model("critic")
            yield from steps.stream("hello")

    for _ in zip(parts("a"), parts("b"), strict=True):
        pass

    assert sorted(named(server)) == [["a"], ["b"]]


RUNS: dict[str, Callable[[Team], Any]] = {
    "graph": graph,
    "chain": lambda team: RunnablePassthrough() | (lambda state: "hello") | team.model("critic"),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("what", RUNS)
async def test_a_stream_made_in_a_block_and_read_behind_it_keeps_the_session(
    what: str, asynchronous: bool, team: Team, server: FakeServer
) -> None:
    run = RUNS[what](team)
    with team.session("s1"):
        parts = run.astream(TASK) if asynchronous else run.stream(TASK)
    assert [part async for part in parts] if asynchronous else list(parts)
    await team.aclose()

    assert {str(sessions) for sessions in named(server)} == {"['s1']"}


ALL_MODES = ["values", "updates", "messages", "debug", "tasks", "custom"]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_it_does_so_in_every_mode(mode: str, team: Team, server: FakeServer) -> None:
    with team.session("s1"):
        parts = graph(team).stream(TASK, stream_mode=mode)
    list(parts)

    assert named(server) == [["s1"], ["s1"]]


def test_a_thread_does_not_take_the_place_of_the_block(team: Team, server: FakeServer) -> None:
    with team.session("s1"):
        parts = graph(team).stream(TASK, {"configurable": {"thread_id": "t"}})
    list(parts)

    assert named(server) == [["s1"], ["s1"]]


@pytest.mark.parametrize("what", RUNS)
def test_of_several_streams_behind_a_block_the_others_are_told_once(
    what: str, team: Team, server: FakeServer
) -> None:
    run = RUNS[what](team)
    with team.session("s1"):
        first, *others = [run.stream(TASK) for _ in range(3)]
    list(first)
    sent = len(server.chats)
    with pytest.warns(SessionLostWarning, match=r"'s1' ended before.*bind\(graph") as told:
        list(chain.from_iterable(others))

    assert len([each for each in told if each.category is SessionLostWarning]) == 1
    assert [str(each) for each in named(server)] == ["['s1']"] * sent + ["[]"] * 2 * sent


def test_a_block_that_had_a_call_is_over_for_what_comes_behind_it(
    team: Team, server: FakeServer
) -> None:
    app = graph(team)
    with team.session("s1"):
        app.invoke(TASK)
    app.invoke(TASK)

    assert named(server) == [["s1"], ["s1"], [], []]


@pytest.mark.filterwarnings("error::prefillshare_agents.SessionLostWarning")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("what", [*RUNS, "model"])
async def test_what_is_invoked_behind_a_block_without_a_call_is_not_of_it(
    what: str, asynchronous: bool, team: Team, server: FakeServer
) -> None:
    """A block may end without a call, where the answer was there already."""
    run = team.model("critic") if what == "model" else RUNS[what](team)
    task: Any = "hello" if what == "model" else TASK
    with team.session("s1"):
        pass
    if asynchronous:
        await run.ainvoke(task)
        await run.abatch([task, task])
    else:
        run.invoke(task)
        run.batch([task, task])
    await team.aclose()

    assert {str(sessions) for sessions in named(server)} == {"[]"}


@pytest.mark.filterwarnings("error::prefillshare_agents.SessionLostWarning")
def test_a_stream_is_its_blocks_also_where_something_is_invoked_before_it_is_read(
    team: Team, server: FakeServer
) -> None:
    app = graph(team)
    with team.session("s1"):
        parts = app.stream(TASK)
    app.invoke(TASK)
    list(parts)
    app.invoke(TASK)

    assert named(server) == [[], [], ["s1"], ["s1"], [], []]


def test_a_run_without_a_session_after_a_block_with_one_is_no_news(team: Team) -> None:
    app = graph(team)
    with team.session("s1"):
        app.invoke(TASK)
    app.invoke(TASK)
    with team.session("s2") as session:
        session.append({"role": "user", "content": "hello"})
        session.chat("critic")
    app.invoke(TASK)
    with Session("s3"):
        pass
    with team.session("s4"):
        app.invoke(TASK)
    app.invoke(TASK)
