"""What tracing sees of a call: its session and its cost, and none of its text."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langgraph.graph import START, MessagesState, StateGraph

from prefillshare_agents.langgraph import ChatPrefillShare, Team, bind, session_config
from prefillshare_agents.langgraph import _telemetry as telemetry
from prefillshare_agents.testing import FakeServer

TASK: Any = {"messages": [("user", "How far is the moon, by a secret way?")]}


KEY: Any = {"api_key": "hidden"}


class Collector(BaseCallbackHandler):
    """Keeps the metadata of every run, of whatever kind."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_chain_start(self, *_: Any, metadata: Any = None, **__: Any) -> None:
        self.seen.append(metadata or {})

    def on_chat_model_start(self, *_: Any, metadata: Any = None, **__: Any) -> None:
        self.seen.append(metadata or {})


@pytest.mark.parametrize("how", ["config", "bound"])
def test_every_run_of_a_trace_names_the_session(how: str, team: Team) -> None:
    collector = Collector()
    agent = team.agent("planner")
    session = team.session("s1")
    if how == "config":
        agent.invoke(TASK, session_config(session, callbacks=[collector], tags=["mine"]))
    else:
        bind(agent, session).invoke(TASK, {"callbacks": [collector]})

    assert len(collector.seen) >= 3
    assert {metadata.get("session_id") for metadata in collector.seen} == {"s1"}
    assert "secret" not in str(collector.seen)


NAMED: dict[str, Callable[[Team, Any], Any]] = {
    "block": lambda team, config: in_block(team, config),
    "model": lambda team, config: team.model("planner", session="s1").invoke("hello", config),
    "node": lambda team, config: one_node(team, session="s1").invoke(TASK, config),
    "thread": lambda team, config: one_node(team).invoke(
        TASK, {**config, "configurable": {"thread_id": "s1"}}
    ),
}


def one_node(team: Team, **options: Any) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("planner", team.node("planner", **options))
    graph.add_edge(START, "planner")
    return graph.compile()


def in_block(team: Team, config: Any) -> None:
    with team.session("s1"):
        one_node(team).invoke(TASK, config)


@pytest.mark.parametrize("how", NAMED)
def test_a_models_run_names_the_session_however_it_is_given(
    how: str, team: Team, server: FakeServer
) -> None:
    collector = Collector()
    NAMED[how](team, {"callbacks": [collector]})

    assert [chat.sessions for chat in server.chats] == [[collector.seen[-1]["session_id"]]]


def test_a_session_id_of_the_users_own_stays(team: Team) -> None:
    collector = Collector()
    metadata = {"session_id": "mine"}
    with team.session("s1"):
        one_node(team).invoke(TASK, {"callbacks": [collector], "metadata": metadata})

    assert {seen["session_id"] for seen in collector.seen} == {"mine"}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_tells_the_span_around_it_what_it_cost(streamed: bool, server: FakeServer) -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    model = ChatPrefillShare(model="critic", base_url=server.url, session="s1", **KEY)
    for _ in range(2):
        with tracer.start_as_current_span("call"):
            pieces: list[Any] = list(model.stream("A secret question.")) if streamed else []
            answer = sum(pieces[1:], pieces[0]) if streamed else model.invoke("A secret question.")
    usage: Any = answer.usage_metadata
    told: dict[str, Any] = dict(exporter.get_finished_spans()[-1].attributes or {})
    provider.shutdown()

    assert told["gen_ai.conversation.id"] == "s1"
    assert told["gen_ai.agent.name"] == told["gen_ai.request.model"] == "critic"
    assert told["gen_ai.usage.input_tokens"] == usage["input_tokens"]
    assert told["gen_ai.usage.cache_read.input_tokens"] > 0
    assert (
        told["gen_ai.usage.cache_read.input_tokens"] == usage["input_token_details"]["cache_read"]
    )
    assert told["prefillshare.affinity"] == "hit"
    assert "secret" not in str(told)
    assert "hidden" not in str(told)


def test_nothing_needs_opentelemetry(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "trace", None)

    assert ChatPrefillShare(model="critic", base_url=server.url).invoke("hello").text
