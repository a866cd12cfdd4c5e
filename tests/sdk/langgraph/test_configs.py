"""The session of a call is named by the config it is given, whatever the model is wrapped in."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from langgraph.graph import START, MessagesState, StateGraph

from prefillshare_agents import Session
from prefillshare_agents._identity import session_id_of_thread
from prefillshare_agents.langgraph import ChatPrefillShare, bind, session_config
from prefillshare_agents.testing import FakeServer

TASK: Any = {"messages": [("user", "How far is the moon?")]}
SCHEMA: Any = {"title": "Verdict", "type": "object", "properties": {}}
PROMPT: Any = ChatPromptTemplate.from_messages([("user", "{input}")])


@pytest.fixture
async def model(server: FakeServer) -> AsyncIterator[Any]:
    made = ChatPrefillShare(model="critic", base_url=server.url)
    yield made
    await made.root_async_client.close()
    made.root_client.close()


def named(server: FakeServer) -> list[list[str]]:
    return [chat.sessions for chat in server.chats]


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: model,
    "bind": lambda model: model.bind(temperature=0),
    "bind_tools": lambda model: model.bind_tools([]),
    "with_config": lambda model: model.with_config(tags=["x"]),
    "with_retry": lambda model: model.with_retry(),
    "with_fallbacks": lambda model: model.with_fallbacks([model]),
    "with_listeners": lambda model: model.with_listeners(on_start=lambda run: None),
    "with_types": lambda model: model.with_types(output_type=str),
    "structured": lambda model: model.with_structured_output(SCHEMA, include_raw=True),
    "chain": lambda model: PROMPT | model,
    "retries of a binding": lambda model: model.bind(temperature=0).with_retry(),
    "bindings of a retry": lambda model: model.with_retry().bind(temperature=0),
    "fallbacks of a retry": lambda model: model.with_retry().with_fallbacks([model]),
    "tools of fallbacks": lambda model: model.with_fallbacks([model]).bind_tools([]),
    "a binding's config": lambda model: model.bind(stop=["."]).with_config(tags=["x"]),
}


@pytest.mark.parametrize("wrapping", WRAPPED)
async def test_every_way_to_call_takes_the_session_of_its_config(
    wrapping: str, model: Any, server: FakeServer
) -> None:
    called = WRAPPED[wrapping](model)
    session = Session("s1")
    config = session_config(session)
    called.invoke("hello", config)
    list(called.stream("hello", config))
    called.batch(["hello"], [config])
    called.batch(["hello"], config)
    list(called.batch_as_completed(["hello"], [config]))
    list(called.transform(iter(["hello"]), config))
    await called.ainvoke("hello", config)
    assert [part async for part in called.astream("hello", config)]
    await called.abatch(["hello"], [config])
    assert [part async for part in called.astream_events("hello", config, version="v2")]

    assert named(server) == [["s1"]] * 10
    assert session.usage.calls == 10


@pytest.mark.parametrize("wrapping", WRAPPED)
async def test_inputs_of_a_batch_may_belong_to_different_sessions(
    wrapping: str, model: Any, server: FakeServer
) -> None:
    configs = [session_config("a"), session_config("b")]
    called = WRAPPED[wrapping](model)
    called.batch(["hello", "hello"], configs)
    list(called.batch_as_completed(["hello", "hello"], configs))
    await called.abatch(["hello", "hello"], configs)

    assert sorted(named(server)) == [["a"]] * 3 + [["b"]] * 3


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_a_config_that_was_bound_names_the_session(
    wrapping: str, model: Any, server: FakeServer
) -> None:
    bound = WRAPPED[wrapping](model).with_config(session_config("s1"))
    bound.invoke("hello")
    list(bound.stream("hello"))

    assert named(server) == [["s1"]] * 2


ORDER: list[tuple[str, dict[str, Any], str]] = [
    ("the thread of the call", {"thread_id": "t"}, session_id_of_thread("t")),
    ("the session before the thread", {"thread_id": "t", "prefillshare_session": "s1"}, "s1"),
]


@pytest.mark.parametrize(("configurable", "expected"), [row[1:] for row in ORDER])
def test_a_models_own_config_is_read_as_a_graphs(
    configurable: dict[str, Any], expected: str, model: Any, server: FakeServer
) -> None:
    model.invoke("hello", {"configurable": configurable})

    assert named(server) == [[expected]]


def test_the_block_comes_before_the_calls_config(model: Any, server: FakeServer) -> None:
    with Session("block"):
        model.invoke("hello", session_config("configured"))

    assert named(server) == [["block"]]


def graph_of(node: Callable[[Any], Any]) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("node", lambda state: {"messages": [node(state["messages"])]})
    graph.add_edge(START, "node")
    return graph.compile()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (session_config("inner"), "inner"),
        ({"configurable": {"unrelated": 1}}, "outer"),
        ({"tags": ["x"]}, "outer"),
    ],
)
def test_inside_a_graph_the_calls_own_config_comes_first(
    config: Any, expected: str, model: Any, server: FakeServer
) -> None:
    graph = graph_of(lambda messages: model.invoke(messages, config))
    graph.invoke(TASK, session_config("outer"))

    assert named(server) == [[expected]]


def assigned(model: Any) -> Any:
    model.session = "two"
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    "assignment": assigned,
    "copy": lambda model: model.model_copy(update={"session": "two"}),
    "configurable field": lambda model: model.configurable_fields(
        session=ConfigurableField(id="session")
    ).with_config(configurable={"session": "two"}),
}


@pytest.mark.parametrize("before", [None, "one"])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_changed_session_is_the_one_sent_and_the_one_counted(
    change: str, before: Any, model: Any, server: FakeServer
) -> None:
    changed = CHANGES[change](model.model_copy(update={"session": before}))
    with Session("two") as session:
        changed.invoke("hello")
        list(changed.stream("hello"))
        await changed.ainvoke("hello")

    assert named(server) == [["two"]] * 3
    assert session.usage.calls == 3


def test_a_graph_that_is_bound_to_an_id_records_nothing(model: Any, server: FakeServer) -> None:
    bound = bind(graph_of(model.invoke), "s1")
    bound.invoke(TASK)
    bound.invoke(TASK)

    assert named(server) == [["s1"]] * 2
    assert bound.session.calls == ()


def test_a_graph_that_is_bound_to_an_id_counts_in_the_block_of_that_id(
    model: Any, server: FakeServer
) -> None:
    bound = bind(graph_of(model.invoke), "s1")
    with Session("s1") as session:
        bound.invoke(TASK)

    assert session.usage.calls == 1


def test_something_else_as_a_models_session_is_refused(model: Any, server: FakeServer) -> None:
    model.session = 4711
    with pytest.raises(TypeError, match="session is 4711; give a Session or its id"):
        model.invoke("hello")
    assert server.chats == []


@pytest.mark.parametrize(
    "options",
    [{"extra_headers": {"X-Session-ID": "mine"}}, {"extra_body": {"session_id": "mine"}}],
)
def test_a_call_that_names_another_session_itself_is_not_counted_here(
    options: Any, model: Any, server: FakeServer
) -> None:
    with Session("block") as session:
        model.invoke("hello", **options)

    assert session.usage.calls == 0
