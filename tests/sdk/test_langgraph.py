"""`ChatPrefillShare` and `Team` in real LangGraph graphs."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Send
from pydantic import BaseModel

from prefillshare_agents import Session
from prefillshare_agents._identity import session_id_of_thread
from prefillshare_agents.langgraph import ChatPrefillShare, Team
from prefillshare_agents.testing import FakeServer

ARGUMENTS = '{ "name":  "m\\u006fon" }'
TASK: Any = {"messages": [("user", "How far is the moon?")]}


@tool
def lookup(name: str) -> str:
    """Look up a distance."""
    return f"{name}: 384,400 km"


class Verdict(BaseModel):
    verdict: Literal["right", "wrong"]


@dataclass
class Context:
    prefillshare_session: str | Session | None = None


@pytest.fixture
def team(server: FakeServer) -> Iterator[Team]:
    made = Team(server.url, ["planner", "caller", "critic"], max_retries=0)
    yield made
    made.close()


def one_node(team: Team, **options: Any) -> Any:
    graph = StateGraph(MessagesState, context_schema=Context)
    graph.add_node("planner", team.node("planner", **options))
    graph.add_edge(START, "planner")
    return graph.compile()


def sessions(server: FakeServer) -> list[list[str]]:
    return [chat.sessions for chat in server.chats]


class TestSessionOfACall:
    """explicit > with block > graph context > configurable > hash of thread_id > none."""

    def test_nothing_given_means_no_session(self, team: Team, server: FakeServer) -> None:
        one_node(team).invoke(TASK)

        assert sessions(server) == [[]]

    def test_a_thread_gives_the_hash_of_its_id(self, team: Team, server: FakeServer) -> None:
        config = {"configurable": {"thread_id": "ada@example.org"}}
        one_node(team).invoke(TASK, config)
        one_node(team).invoke(TASK, config)

        assert sessions(server) == [[session_id_of_thread("ada@example.org")]] * 2
        assert "ada" not in server.chats[0].sessions[0]

    def test_configurable_comes_before_the_thread(self, team: Team, server: FakeServer) -> None:
        config = {"configurable": {"thread_id": "t", "prefillshare_session": "configured"}}
        one_node(team).invoke(TASK, config)

        assert sessions(server) == [["configured"]]

    @pytest.mark.parametrize("kind", [str, Session])
    def test_the_graphs_context_comes_before_configurable(
        self, kind: type[str] | type[Session], team: Team, server: FakeServer
    ) -> None:
        config = {"configurable": {"prefillshare_session": "configured"}}
        one_node(team).invoke(TASK, config, context=Context(prefillshare_session=kind("context")))

        assert sessions(server) == [["context"]]

    def test_a_context_without_a_session_is_passed_over(
        self, team: Team, server: FakeServer
    ) -> None:
        config = {"configurable": {"prefillshare_session": "configured"}}
        one_node(team).invoke(TASK, config, context=Context())

        assert sessions(server) == [["configured"]]

    def test_the_with_block_comes_before_the_graphs_context(
        self, team: Team, server: FakeServer
    ) -> None:
        with team.session("block"):
            one_node(team).invoke(TASK, context=Context(prefillshare_session="context"))

        assert sessions(server) == [["block"]]

    def test_an_explicit_session_comes_before_the_with_block(
        self, team: Team, server: FakeServer
    ) -> None:
        with team.session("block"):
            one_node(team, session="explicit").invoke(TASK)

        assert sessions(server) == [["explicit"]]

    def test_something_else_as_session_is_refused(self, team: Team) -> None:
        config = {"configurable": {"prefillshare_session": 4711}}
        with pytest.raises(TypeError, match="prefillshare_session is 4711"):
            one_node(team).invoke(TASK, config)

    async def test_async_runs_follow_the_same_order(self, team: Team, server: FakeServer) -> None:
        graph = one_node(team)
        await graph.ainvoke(TASK, {"configurable": {"thread_id": "t"}})
        await graph.ainvoke(TASK, context=Context(prefillshare_session="context"))
        with team.session("block"):
            await graph.ainvoke(TASK, context=Context(prefillshare_session="context"))
        await team.aclose()

        assert sessions(server) == [[session_id_of_thread("t")], ["context"], ["block"]]

    def test_parallel_branches_keep_the_session(self, team: Team, server: FakeServer) -> None:
        class State(TypedDict):
            messages: Annotated[list[Any], operator.add]

        graph = StateGraph(State)
        graph.add_node("planner", team.node("planner"))
        branches = [
            Send("planner", {"messages": [HumanMessage("A task"), HumanMessage(f"{i}")]})
            for i in range(8)
        ]
        graph.add_conditional_edges(START, lambda _: branches, ["planner"])
        with team.session("block") as session:
            graph.compile().invoke({"messages": []})

        assert sessions(server) == [["block"]] * 8
        assert session.usage.calls == 8

    def test_a_checkpointed_thread_keeps_its_session(self, team: Team, server: FakeServer) -> None:
        builder = StateGraph(MessagesState)
        builder.add_node("planner", team.node("planner"))
        builder.add_edge(START, "planner")
        saver = InMemorySaver()
        for _ in range(2):
            graph: Any = builder.compile(checkpointer=saver)
            graph.invoke(TASK, {"configurable": {"thread_id": "t"}})

        assert sessions(server) == [[session_id_of_thread("t")]] * 2
        assert len(server.chats[1].body["messages"]) == 3


class TestNode:
    def test_instructions_lead_the_request_and_stay_out_of_the_state(
        self, team: Team, server: FakeServer
    ) -> None:
        server.script(["Look it up."])
        state = one_node(team, instructions="Plan.", max_tokens=9).invoke(TASK)

        body = server.chats[0].body
        assert body["model"] == "planner"
        assert body["max_completion_tokens"] == 9
        assert body["messages"] == [
            {"role": "system", "content": "Plan."},
            {"role": "user", "content": "How far is the moon?"},
        ]
        assert [item.content for item in state["messages"]] == [
            "How far is the moon?",
            "Look it up.",
        ]
        assert state["messages"][1].name == "planner"

    def test_roles_may_map_to_other_model_names(self, server: FakeServer) -> None:
        team = Team(server.url, {"planner": "planner-v2"})
        one_node(team).invoke(TASK)
        team.close()

        assert server.chats[0].body["model"] == "planner-v2"

    def test_an_unknown_role_is_refused_with_the_known_ones(self, team: Team) -> None:
        with pytest.raises(ValueError, match=r"'writer'.*planner, caller, critic"):
            team.node("writer")

    def test_a_system_message_in_the_state_is_refused(self, team: Team) -> None:
        with pytest.raises(ValueError, match="instructions="):
            one_node(team).invoke({"messages": [SystemMessage("x"), HumanMessage("y")]})

    def test_output_asks_for_json_of_the_model(self, team: Team, server: FakeServer) -> None:
        server.script(['{"verdict": "right"}'])
        state = one_node(team, output=Verdict).invoke(TASK)

        asked = server.chats[0].body["response_format"]
        assert asked["type"] == "json_schema"
        assert asked["json_schema"]["schema"] == Verdict.model_json_schema()
        answer = state["messages"][-1]
        assert Verdict.model_validate_json(answer.content).verdict == "right"

    def test_tools_and_tool_choice_go_with_the_nodes_own_calls(
        self, team: Team, server: FakeServer
    ) -> None:
        one_node(team, tools=[lookup], tool_choice="lookup", strict=True).invoke(TASK)

        body = server.chats[0].body
        assert body["tools"][0]["function"]["strict"] is True
        assert [item["function"]["name"] for item in body["tools"]] == ["lookup"]
        assert body["tool_choice"] == {"type": "function", "function": {"name": "lookup"}}

    def test_a_role_switch_sends_the_same_conversation(
        self, team: Team, server: FakeServer
    ) -> None:
        graph = StateGraph(MessagesState)
        graph.add_node("planner", team.node("planner", instructions="Plan.", tools=[lookup]))
        graph.add_node("critic", team.node("critic", instructions="Judge.", output=Verdict))
        graph.add_edge(START, "planner")
        graph.add_edge("planner", "critic")
        compiled: Any = graph.compile()
        compiled.invoke(TASK)

        first, second = (chat.body["messages"] for chat in server.chats)
        # The server tells the critic, behind the conversation, whose answer this is.
        answer = {"role": "assistant", "content": "an answer by planner", "name": "planner"}
        assert second[1:] == [*first[1:], answer]


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_arguments_go_back_byte_for_byte(
    streamed: bool, team: Team, server: FakeServer
) -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": ARGUMENTS}},
        {
            "id": "c2",
            "type": "function",
            "function": {"name": "lookup", "arguments": '{"name":1e2}'},
        },
    ]
    server.script([{"tool_calls": calls}, "done"])

    graph = StateGraph(MessagesState)
    graph.add_node("caller", team.node("caller", tools=[lookup]))
    graph.add_node("tools", ToolNode([lookup], handle_tool_errors=True))
    graph.add_node("critic", team.node("critic"))
    for left, right in [(START, "caller"), ("caller", "tools"), ("tools", "critic")]:
        graph.add_edge(left, right)
    graph.add_edge("critic", END)
    compiled: Any = graph.compile()
    if streamed:
        list(compiled.stream(TASK, stream_mode="messages"))
    else:
        compiled.invoke(TASK)

    messages = server.chats[1].body["messages"]
    assert server.chats[0].body.get("stream", False) is streamed
    assert messages[1]["tool_calls"] == calls
    assert messages[2]["content"] == "moon: 384,400 km"


def test_edited_tool_arguments_go_out_as_edited(server: FakeServer) -> None:
    call: Any = {
        "id": "c1",
        "type": "function",
        "function": {"name": "lookup", "arguments": ARGUMENTS},
    }
    server.script([{"tool_calls": [call]}])
    model = ChatPrefillShare(model="caller", base_url=server.url)
    answer = model.invoke("hello")
    answer.tool_calls[0]["args"] = {"name": "Mars"}
    model.invoke([HumanMessage("hello"), answer, ToolMessage("x", tool_call_id="c1")])

    sent = server.chats[1].body["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert sent == '{"name": "Mars"}'


@pytest.mark.parametrize("mode", ["invoke", "stream", "json", "json stream"])
async def test_answers_carry_usage_and_the_servers_account(mode: str, server: FakeServer) -> None:
    server.script(['{"verdict": "right"}', '{"verdict": "wrong"}'])
    session = Session("s1")
    base = ChatPrefillShare(model="critic", base_url=server.url, session=session)
    model: Any = base
    if mode.startswith("json"):
        form = {"name": "v", "schema": Verdict.model_json_schema()}
        model = base.bind(response_format={"type": "json_schema", "json_schema": form})
    if mode.endswith("stream"):
        answers = [_sum(list(model.stream("hello"))), await _asum(model.astream("hello"))]
    else:
        answers = [model.invoke("hello"), await model.ainvoke("hello")]
    await base.root_async_client.close()

    assert [answer.text for answer in answers] == ['{"verdict": "right"}', '{"verdict": "wrong"}']
    for answer, affinity, cached in zip(answers, ["new", "hit"], [0, 8], strict=True):
        assert answer.response_metadata["prefillshare"]["affinity"] == affinity
        assert answer.usage_metadata["input_token_details"]["cache_read"] == cached
    assert [call.cached_tokens for call in session.calls] == [0, 8]
    assert [call.affinity for call in session.calls] == ["new", "hit"]
    assert [call.finish_reason for call in session.calls] == ["stop", "stop"]
    assert [call.ttft_s is not None for call in session.calls] == [mode.endswith("stream")] * 2


def test_the_session_counts_the_nodes_calls(team: Team, server: FakeServer) -> None:
    with team.session() as session:
        one_node(team).invoke(TASK)
        list(one_node(team).stream(TASK, stream_mode="messages"))

    assert session.usage.calls == session.totals().calls == 2
    assert session.usage.cached_tokens == session.totals().cached_tokens > 0


def test_a_model_without_a_key_or_session_needs_neither(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    ChatPrefillShare(model="critic", base_url=server.url).invoke("hello")

    assert ("authorization", "Bearer local") in server.chats[0].headers
    assert sessions(server) == [[]]


def test_chat_completions_are_used_whatever_the_model_is_called(
    server: FakeServer,
) -> None:
    model = ChatPrefillShare(model="gpt-6-mini", base_url=server.url).bind_tools([lookup])
    model.invoke("hello")

    assert [item.path for item in server.requests] == ["/v1/chat/completions"]


def _sum(chunks: list[Any]) -> Any:
    return sum(chunks[1:], chunks[0])


async def _asum(chunks: Any) -> Any:
    return _sum([chunk async for chunk in chunks])


def test_the_answer_is_an_ordinary_ai_message(team: Team) -> None:
    answer = one_node(team).invoke(TASK)["messages"][-1]

    assert type(answer) is AIMessage
