"""Graphs of other shapes: swarm, supervisor as tools, subgraphs, branches, interrupts."""

from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph, add_messages
from langgraph.types import Command, Send, interrupt
from langgraph_swarm import create_handoff_tool, create_swarm

from prefillshare_agents.langgraph import Team
from prefillshare_agents.testing import FakeServer, tool_call

TASK: Any = {"messages": [("user", "How far is the moon?")]}


def roles(server: FakeServer) -> list[str]:
    return [chat.body["model"] for chat in server.chats]


def test_a_swarm_hands_the_conversation_over_in_one_session(team: Team, server: FakeServer) -> None:
    agents: list[Any] = [
        team.agent(
            role, instructions=f"You are the {role}.", tools=[create_handoff_tool(agent_name=other)]
        )
        for role, other in (("planner", "solver"), ("solver", "planner"))
    ]
    swarm: Any = create_swarm(agents, default_active_agent="planner").compile(
        checkpointer=InMemorySaver()
    )
    server.script("planner", [tool_call("transfer_to_solver"), "Ask the solver."])
    server.script("solver", ["384,400 km.", tool_call("transfer_to_planner")])
    config = {"configurable": {"thread_id": "1"}}
    with team.session() as session:
        swarm.invoke(TASK, config)
        swarm.invoke({"messages": [("user", "What next?")]}, config)

    assert roles(server) == ["planner", "solver", "solver", "planner"]
    assert session.usage.calls == 4
    server.assert_shared(1.0)
    server.assert_script_used()


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_role_asked_as_a_tool_shares_the_supervisors_conversation(
    asynchronous: bool, team: Team, server: FakeServer
) -> None:
    ask = team.tool("solver", description="Ask for a number.", instructions="Give one number.")
    supervisor = team.agent("planner", instructions="Delegate.", tools=[ask])
    server.script("planner", [tool_call("ask_solver", question="In km?"), "It is far."])
    server.script("solver", ["384,400"])
    with team.session() as session:
        state = await supervisor.ainvoke(TASK) if asynchronous else supervisor.invoke(TASK)
    await team.aclose()

    assert roles(server) == ["planner", "solver", "planner"]
    assert [item["role"] for item in server.chats[1].body["messages"]] == ["system", "user", "user"]
    assert state["messages"][-2].content == "384,400"
    assert session.usage.calls == 3
    server.assert_shared(1.0)


def test_a_subgraph_belongs_to_the_session_of_its_thread(team: Team, server: FakeServer) -> None:
    inner = StateGraph(MessagesState)
    inner.add_node("solver", team.node("solver"))
    inner.add_edge(START, "solver")
    outer = StateGraph(MessagesState)
    outer.add_node("planner", team.node("planner"))
    outer.add_node("inner", inner.compile())
    outer.add_node("critic", team.agent("critic"))
    for left, right in [(START, "planner"), ("planner", "inner"), ("inner", "critic")]:
        outer.add_edge(left, right)
    app: Any = outer.compile(checkpointer=InMemorySaver())
    app.invoke(TASK, {"configurable": {"thread_id": "1"}})

    assert roles(server) == ["planner", "solver", "critic"]
    assert len({chat.sessions[0] for chat in server.chats}) == 1
    server.assert_shared(1.0)


class Branches(TypedDict):
    messages: Annotated[list[Any], add_messages]


async def test_branches_share_what_they_branch_from(team: Team, server: FakeServer) -> None:
    graph = StateGraph(Branches)
    graph.add_node("solver", team.node("solver"))
    graph.add_node("critic", team.node("critic"))
    task = HumanMessage("A long task that all branches read.")
    branches = [
        Send("solver", {"messages": [task, HumanMessage(f"Try way {i}.")]}) for i in range(4)
    ]
    graph.add_conditional_edges(START, lambda _: branches, ["solver"])
    graph.add_edge("solver", "critic")
    app: Any = graph.compile()
    with team.session() as session:
        await app.ainvoke({"messages": [task]})
    await team.aclose()

    assert sorted(roles(server)) == ["critic", *["solver"] * 4]
    assert session.usage.calls == 5
    server.assert_shared(1.0)


def test_an_interrupted_run_resumes_in_its_session(team: Team, server: FakeServer) -> None:
    @tool
    def ask_human(question: str) -> str:
        """Ask a human."""
        return str(interrupt(question))

    app: Any = team.agent("planner", tools=[ask_human], checkpointer=InMemorySaver())
    server.script([tool_call("ask_human", question="May I?"), "Done."])
    config = {"configurable": {"thread_id": "1"}}
    stopped = app.invoke(TASK, config)
    state = app.invoke(Command(resume="Yes."), config)

    assert stopped["__interrupt__"][0].value == "May I?"
    assert isinstance(state["messages"][-1], AIMessage)
    assert len({chat.sessions[0] for chat in server.chats}) == 1
    assert server.chats[1].body["messages"][-1]["content"] == "Yes."
    server.assert_shared(1.0)
