"""`Team`: what its models' clients are given, and in which session their calls count."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import openai
import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import SecretStr

from prefillshare_agents import OpenAI, Session, TokenBudgetError
from prefillshare_agents.langgraph import ChatPrefillShare, Team
from prefillshare_agents.testing import FakeServer

TASK: Any = {"messages": [HumanMessage("How far is the moon?")]}


@pytest.fixture
def team(server: FakeServer) -> Iterator[Team]:
    made = Team(server.url, {"critic": "critic-v2"}, max_retries=0)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        ({"timeout": 7}, "timeout", 7),
        ({"request_timeout": 7}, "timeout", 7),
        ({"max_retries": 5}, "max_retries", 5),
        ({"api_key": "mine"}, "api_key", "mine"),
        ({"openai_api_key": SecretStr("mine")}, "api_key", "mine"),
        ({"base_url": "http://127.0.0.1:9/v1"}, "base_url", "http://127.0.0.1:9/v1/"),
        ({"openai_api_base": "http://127.0.0.1:9/v1"}, "base_url", "http://127.0.0.1:9/v1/"),
        ({"organization": "lab"}, "organization", "lab"),
    ],
)
def test_a_models_own_client_options_reach_both_clients(
    options: Any, name: str, expected: object, team: Team
) -> None:
    model = team.model("critic", **options)

    for client in (model.root_client, model.root_async_client):
        value = getattr(client, name)
        assert (str(value) if name == "base_url" else value) == expected


def test_a_models_own_headers_and_retries_are_used(team: Team, server: FakeServer) -> None:
    server.fail(409)
    team.node("critic", default_headers={"X-Trace": "1"}, max_retries=1).invoke(TASK)

    assert [("x-trace", "1") in chat.headers for chat in server.chats] == [True, True]


async def test_a_team_takes_a_transport_for_each_kind_of_run(server: FakeServer) -> None:
    headers = {"X-Transport": "mine"}
    team = Team(
        server.url,
        ["critic"],
        http_client=openai.DefaultHttpxClient(headers=headers),
        http_async_client=openai.DefaultAsyncHttpxClient(headers=headers),
    )
    node = team.node("critic")
    node.invoke(TASK)
    await node.ainvoke(TASK)
    await team.aclose()

    assert [("x-transport", "mine") in chat.headers for chat in server.chats] == [True, True]


def test_a_string_is_no_list_of_roles(server: FakeServer) -> None:
    with pytest.raises(TypeError, match=r"'planner'.*\['planner'\]"):
        Team(server.url, "planner")


def test_usage_is_counted_under_the_roles_name(team: Team, server: FakeServer) -> None:
    with team.session() as session:
        team.node("critic").invoke(TASK)

    assert list(session.usage.roles) == ["critic"]
    assert server.chats[0].body["model"] == "critic-v2"
    assert "role" not in server.chats[0].body


async def test_an_asynchronous_session_of_a_team_is_on_its_server(
    team: Team, server: FakeServer
) -> None:
    async with team.asession("s1", mode="isolate") as session:
        session.append({"role": "user", "content": "How far is the moon?"})
        await session.chat("critic-v2")
        await team.node("critic").ainvoke(TASK)
    await team.aclose()

    assert [chat.sessions for chat in server.chats] == [["s1"]] * 2
    assert [("x-prefillshare-mode", "isolate") in chat.headers for chat in server.chats] == [
        True,
        True,
    ]
    assert session.usage.calls == 2


@pytest.mark.parametrize(
    "message",
    [
        ("system", "Be kind."),
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "Be kind."},
    ],
)
def test_a_leading_system_message_is_refused_in_any_form(
    message: Any, team: Team, server: FakeServer
) -> None:
    with pytest.raises(ValueError, match="instructions="):
        team.node("critic").invoke({"messages": [message, ("user", "hello")]})
    assert server.chats == []


@pytest.mark.parametrize(("header", "counted"), [("other", 0), ("block", 1)])
def test_a_call_counts_where_the_models_header_sends_it(
    header: str, counted: int, team: Team, server: FakeServer
) -> None:
    model = team.model("critic", default_headers={"x-session-id": header})
    with team.session("block") as session:
        model.invoke("hello")

    assert server.chats[0].sessions == [header]
    assert session.usage.calls == counted


@pytest.mark.parametrize(("named", "counted"), [("other", 0), ("block", 1)])
def test_a_call_with_a_named_session_counts_in_the_current_one_of_that_id(
    named: str, counted: int, server: FakeServer
) -> None:
    model = ChatPrefillShare(model="critic", base_url=server.url, session=named)
    with Session("block") as session:
        model.invoke("hello")

    assert server.chats[0].sessions == [named]
    assert session.usage.calls == counted


def test_a_call_through_a_client_of_the_callers_counts(server: FakeServer) -> None:
    with OpenAI(base_url=server.url, api_key="local") as client, Session("block") as session:
        ChatPrefillShare(model="critic", client=client.chat.completions).invoke("hello")

    assert server.chats[0].sessions == ["block"]
    assert session.usage.calls == 1


THREAD: Any = {"configurable": {"thread_id": "order-4711"}}


def checkpointed(team: Team) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("critic", team.node("critic"))
    graph.add_edge(START, "critic")
    return graph.compile(checkpointer=InMemorySaver())


def test_a_threads_session_counts_and_is_the_one_without_the_block(
    team: Team, server: FakeServer
) -> None:
    app = checkpointed(team)
    with team.session(thread_id="order-4711", token_budget=10_000) as session:
        app.invoke(TASK, THREAD)
    app.invoke(TASK, THREAD)

    assert [chat.sessions for chat in server.chats] == [[session.id]] * 2
    assert session.usage.calls == 1


def test_the_budget_of_a_threads_session_holds(team: Team, server: FakeServer) -> None:
    with team.session(thread_id="order-4711", token_budget=1), pytest.raises(TokenBudgetError):
        checkpointed(team).invoke(TASK, THREAD)

    assert server.chats == []


@pytest.mark.parametrize("thread_id", ["order-4711", 7, UUID(int=7)])
async def test_both_kinds_of_session_take_a_thread(
    thread_id: str | int | UUID, team: Team, server: FakeServer
) -> None:
    sessions = [team.session(thread_id=thread_id), team.asession(thread_id=thread_id)]
    checkpointed(team).invoke(TASK, {"configurable": {"thread_id": thread_id}})
    await team.aclose()

    assert [[session.id] for session in sessions] == [server.chats[0].sessions] * 2


async def test_a_session_has_an_id_or_a_thread(team: Team) -> None:
    told = r"id is 's1' and thread_id is 't1'; give one"
    with pytest.raises(ValueError, match=told):
        team.session("s1", thread_id="t1")
    with pytest.raises(ValueError, match=told):
        team.asession("s1", thread_id="t1")
    await team.aclose()


@dataclass
class Question:
    question: str


@dataclass(slots=True)
class Asked:
    question: str
    messages: list[Any]


@pytest.mark.parametrize("state", [{"question": "How far?"}, Question("How far?")])
async def test_a_node_names_the_keys_of_a_state_without_messages(state: Any, team: Team) -> None:
    node = team.node("critic")
    told = r"'critic'.*no messages.*\[question\].*MessagesState.*team\.model\('critic'\)"
    with pytest.raises(ValueError, match=told):
        node.invoke(state)
    with pytest.raises(ValueError, match=told):
        await node.ainvoke(state)
    await team.aclose()


def test_a_state_may_be_an_object(team: Team, server: FakeServer) -> None:
    team.node("critic").invoke(Asked("How far?", [("user", "How far is the moon?")]))

    assert server.chats[0].body["messages"] == [{"role": "user", "content": "How far is the moon?"}]


def test_a_tool_names_the_keys_of_a_state_without_messages(team: Team) -> None:
    pytest.importorskip("langchain")
    asking: Any = team.tool("critic", description="Ask the critic.")
    with pytest.raises(ValueError, match=r"'critic'.*no messages.*\[question\]"):
        asking.func("How far?", {"question": "How far?"})


def test_a_team_in_a_block_is_closed_at_its_end(server: FakeServer) -> None:
    with Team(server.url, ["critic"]) as team:
        team.node("critic").invoke(TASK)

    assert len(server.chats) == 1
    assert team._client.is_closed()


async def test_a_team_in_an_async_block_is_closed_for_all_runs(server: FakeServer) -> None:
    async with Team(server.url, ["critic"]) as team:
        team.node("critic").invoke(TASK)
        await team.node("critic").ainvoke(TASK)

    assert len(server.chats) == 2
    assert team._client.is_closed()
    assert team._async_client.is_closed()


@pytest.mark.parametrize("name", ["timeoutt", "mode"])
def test_an_option_that_a_team_does_not_have_is_named(name: str, server: FakeServer) -> None:
    options: Any = {name: 1}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        Team(server.url, ["critic"], **options)
