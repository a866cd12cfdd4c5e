"""A stream keeps the session of the place where it was made, in all modes."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from langchain_core.runnables import RunnablePassthrough
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph

from prefillshare_agents import AsyncSession, Session
from prefillshare_agents.langgraph import ChatPrefillShare, Team, bind, session_config
from prefillshare_agents.testing import FakeServer

TASK: Any = {"messages": [("user", "How far is the moon?")]}
MODES: list[Any] = ["values", "updates", "messages", "custom", "debug", "checkpoints", "tasks"]


def two_roles(team: Team, **compiling: Any) -> Any:
    def tell(state: Any) -> dict[str, Any]:
        get_stream_writer()({"seen": len(state["messages"])})
        return {}

    graph = StateGraph(MessagesState)
    graph.add_node("planner", team.node("planner", instructions="Plan."))
    graph.add_node("tell", tell)
    graph.add_node("critic", team.node("critic", instructions="Judge."))
    for left, right in [(START, "planner"), ("planner", "tell"), ("tell", "critic")]:
        graph.add_edge(left, right)
    return graph.compile(**compiling)


def named(server: FakeServer) -> list[list[str]]:
    return [chat.sessions for chat in server.chats]


@pytest.fixture
async def model(server: FakeServer) -> AsyncIterator[Any]:
    made = ChatPrefillShare(model="critic", base_url=server.url)
    yield made
    await made.root_async_client.close()
    made.root_client.close()


SCHEMA: Any = {"title": "Verdict", "type": "object", "properties": {}}

WRAPPED: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: model,
    "bind_tools": lambda model: model.bind_tools([]),
    "with_config": lambda model: model.with_config(tags=["x"]),
    "with_retry": lambda model: model.with_retry(),
    "with_fallbacks": lambda model: model.with_fallbacks([model]),
    "with_listeners": lambda model: model.with_listeners(on_start=lambda run: None),
    "with_types": lambda model: model.with_types(output_type=str),
    "structured": lambda model: model.with_structured_output(SCHEMA, include_raw=True),
    "a binding's config": lambda model: model.bind_tools([]).with_config(tags=["x"]),
    "a retry's config": lambda model: model.with_retry().with_config(tags=["x"]),
    "a fallback's config": lambda model: model.with_fallbacks([model]).with_config(tags=["x"]),
    "a binding's fallbacks": lambda model: model.bind_tools([]).with_fallbacks([model]),
}


def inputs(*items: str) -> Any:
    return iter(items)


async def ainputs(*items: str) -> Any:
    for item in items:
        yield item


STREAMED: dict[str, Callable[[Any], Any]] = {
    "stream": lambda called: called.stream("hello"),
    "transform": lambda called: called.transform(inputs("hello")),
    "batch_as_completed": lambda called: called.batch_as_completed(["hello"]),
}
ASTREAMED: dict[str, Callable[[Any], Any]] = {
    "astream": lambda called: called.astream("hello"),
    "atransform": lambda called: called.atransform(ainputs("hello")),
    "abatch_as_completed": lambda called: called.abatch_as_completed(["hello"]),
    "astream_events": lambda called: called.astream_events("hello", version="v2"),
}


@pytest.mark.parametrize("wrapping", WRAPPED)
@pytest.mark.parametrize("streaming", [*STREAMED, *ASTREAMED])
async def test_a_stream_read_after_the_block_keeps_the_session(
    wrapping: str, streaming: str, model: Any, server: FakeServer
) -> None:
    called = WRAPPED[wrapping](model)
    async with AsyncSession("s1") as session:
        stream = {**STREAMED, **ASTREAMED}[streaming](called)
    with Session("another"):
        parts = list(stream) if streaming in STREAMED else [part async for part in stream]

    assert parts
    assert named(server) == [["s1"]]
    assert session.usage.calls == 1


@pytest.mark.parametrize("wrapping", WRAPPED)
async def test_a_coroutine_awaited_after_the_block_keeps_the_session(
    wrapping: str, model: Any, server: FakeServer
) -> None:
    called = WRAPPED[wrapping](model)
    with Session("s1") as session:
        coroutines = called.ainvoke("hello"), called.abatch(["hello"])
    for coroutine in coroutines:
        await coroutine

    assert named(server) == [["s1"]] * 2
    assert session.usage.calls == 2


@pytest.mark.filterwarnings("ignore:astream_log is deprecated")
async def test_a_log_read_after_the_block_keeps_the_session(model: Any, server: FakeServer) -> None:
    with Session("s1"):
        patches = model.astream_log("hello")
    assert [patch async for patch in patches]

    assert named(server) == [["s1"]]


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
@pytest.mark.parametrize("wrapping", ["model", "bind_tools", "a binding's config"])
async def test_an_event_object_read_after_the_block_keeps_the_session(
    wrapping: str, model: Any, server: FakeServer
) -> None:
    called = WRAPPED[wrapping](model)
    with Session("s1") as session:
        events = called.stream_events("hello", version="v3")
        aevents = called.astream_events("hello", version="v3")
    with Session("another"):
        assert list(events)
        assert [event async for event in await aevents]

    assert named(server) == [["s1"]] * 2
    assert session.usage.calls == 2


def test_a_chains_stream_keeps_the_session_by_config_or_bind(
    model: Any, server: FakeServer
) -> None:
    chain = RunnablePassthrough() | model
    with Session("s1") as session:
        configured = chain.stream("hello", session_config(session))
        bound = bind(chain, session).stream("hello")
    list(configured), list(bound)

    assert named(server) == [["s1"]] * 2


@pytest.mark.parametrize("mode", [*MODES, ["values", "messages"]])
async def test_every_mode_of_a_bound_graph_keeps_the_session(
    mode: Any, team: Team, server: FakeServer
) -> None:
    graph = two_roles(team, checkpointer=InMemorySaver())
    session = team.session("s1")
    stream = bind(graph, session).stream(
        TASK, {"configurable": {"thread_id": "1"}}, stream_mode=mode
    )
    astream = bind(graph, session).astream(
        TASK, {"configurable": {"thread_id": "2"}}, stream_mode=mode
    )
    with team.session("another"):
        assert list(stream)
        assert [part async for part in astream]
    await team.aclose()

    assert named(server) == [["s1"]] * 4
    assert session.usage.calls == 4


def test_typed_parts_and_subgraphs_come_through(team: Team, server: FakeServer) -> None:
    outer = StateGraph(MessagesState)
    outer.add_node("inner", two_roles(team))
    outer.add_edge(START, "inner")
    graph: Any = outer.compile()
    stream = bind(graph, team.session("s1")).stream(
        TASK, stream_mode=["updates", "messages"], version="v2", subgraphs=True
    )
    parts = list(stream)

    assert {part["type"] for part in parts} == {"updates", "messages"}
    assert any(part["ns"] for part in parts)
    assert named(server) == [["s1"]] * 2


@pytest.mark.parametrize("how", ["config", "bound", "events"])
async def test_ways_to_read_a_plain_graphs_stream_after_the_block(
    how: str, team: Team, server: FakeServer
) -> None:
    graph = two_roles(team)
    with team.session("s1") as session:
        made: dict[str, Callable[[], Any]] = {
            "config": lambda: graph.astream(TASK, session_config(session)),
            "bound": lambda: bind(graph, session).astream(TASK),
            "events": lambda: bind(graph, "s1").astream_events(TASK, version="v2"),
        }
        stream = made[how]()
    assert [part async for part in stream]
    await team.aclose()

    assert named(server) == [["s1"]] * 2
    assert session.usage.calls == 2


def test_a_stream_given_up_leaves_no_session_behind(team: Team, server: FakeServer) -> None:
    stream: Any = bind(two_roles(team), team.session("s1")).stream(TASK)
    next(stream)
    stream.close()
    team.model("critic").invoke("hello")

    assert named(server)[-1] == []


def test_a_bound_graph_has_the_graphs_own_methods(team: Team) -> None:
    graph: Any = bind(two_roles(team, checkpointer=InMemorySaver()), "s1")
    config = {"configurable": {"thread_id": "1"}}
    graph.invoke(TASK, config)

    assert len(graph.get_state(config).values["messages"]) == 3


async def sync_and_async(called: dict[str, Callable[[], Any]], how: str) -> None:
    made = called[how]()
    if hasattr(made, "__await__"):
        made = await made
    if hasattr(made, "__anext__") or hasattr(made, "__aiter__"):
        assert [part async for part in made]
    elif hasattr(made, "__iter__"):
        assert list(made)


def ways_to_run(graph: Any) -> dict[str, Callable[[], Any]]:
    return {
        "invoke": lambda: graph.invoke(TASK),
        "ainvoke": lambda: graph.ainvoke(TASK),
        "batch": lambda: graph.batch([TASK]),
        "abatch": lambda: graph.abatch([TASK]),
        "batch_as_completed": lambda: graph.batch_as_completed([TASK]),
        "abatch_as_completed": lambda: graph.abatch_as_completed([TASK]),
        "stream": lambda: graph.stream(TASK),
        "astream": lambda: graph.astream(TASK),
        "transform": lambda: graph.transform(inputs(TASK)),
        "atransform": lambda: graph.atransform(ainputs(TASK)),
        "astream_log": lambda: graph.astream_log(TASK),
        "astream_events": lambda: graph.astream_events(TASK, version="v2"),
        "stream_events v3": lambda: graph.stream_events(TASK, version="v3"),
        "astream_events v3": lambda: graph.astream_events(TASK, version="v3"),
    }


@pytest.mark.filterwarnings(
    "ignore::langchain_core._api.beta_decorator.LangChainBetaWarning",
    "ignore:astream_log is deprecated",
)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("how", ways_to_run(None))
async def test_every_way_to_run_a_bound_graph_keeps_the_session(
    how: str, asynchronous: bool, team: Team, server: FakeServer
) -> None:
    session = team.asession("s1") if asynchronous else team.session("s1")
    graph = bind(two_roles(team), session)
    with team.session("another") as another:
        await sync_and_async(ways_to_run(graph), how)
    await team.aclose()

    assert graph.session is session
    assert named(server) == [["s1"]] * 2
    assert (session.usage.calls, another.usage.calls) == (2, 0)


REMADE: dict[str, Callable[[Any], Any]] = {
    "bind": lambda graph: graph.bind(),
    "with_config": lambda graph: graph.with_config(tags=["x"], metadata={"of": "mine"}),
    "with_config configurable": lambda graph: graph.with_config(configurable={"mine": 1}),
    "with_retry": lambda graph: graph.with_retry(),
    "with_types": lambda graph: graph.with_types(),
    "with_listeners": lambda graph: graph.with_listeners(on_start=lambda run: None),
    "with_fallbacks": lambda graph: graph.with_fallbacks([graph]),
    "copy": lambda graph: graph.model_copy(),
    "pipe": lambda graph: graph | RunnablePassthrough(),
}


@pytest.mark.parametrize("remaking", REMADE)
async def test_what_is_made_of_a_bound_graph_keeps_the_session(
    remaking: str, team: Team, server: FakeServer
) -> None:
    graph = REMADE[remaking](bind(two_roles(team), "s1"))
    with team.session("another"):
        graph.invoke(TASK)
        assert list(graph.stream(TASK))
        await graph.ainvoke(TASK)
    await team.aclose()

    assert named(server) == [["s1"]] * 6


def test_a_bound_graph_may_be_bound_to_another_session(team: Team, server: FakeServer) -> None:
    bind(two_roles(team), "s1").with_config(session_config("s2")).invoke(TASK)

    assert named(server) == [["s2"]] * 2
