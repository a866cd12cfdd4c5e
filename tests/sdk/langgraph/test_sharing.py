"""How much of their prompts four agents share, and what that is due to."""

from typing import Any

import pytest
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph

from prefillshare_agents import PrefixBreakWarning
from prefillshare_agents.langgraph import Team
from prefillshare_agents.testing import FakeServer

from .conftest import ROLES

DOCUMENT = " ".join(f"Paragraph {i} says that the moon is {i} km away." for i in range(300))


def team_graph(team: Team) -> Any:
    def tool_of(role: str) -> Any:
        @tool(f"{role}_tool")
        def own(text: str) -> str:
            """Do what only this role does."""
            return text

        return own

    graph = StateGraph(MessagesState)
    previous: Any = START
    for role in ROLES:
        agent = team.agent(role, instructions=f"You are the {role}.", tools=[tool_of(role)])
        graph.add_node(role, agent)
        graph.add_edge(previous, role)
        previous = role
    return graph.compile()


def shared_prompts(layout: Any) -> float:
    with FakeServer(ROLES, layout=layout) as server:
        team = Team(server.url, ROLES)
        with team.session():
            team_graph(team).invoke({"messages": [("user", DOCUMENT)]})
        team.close()
        assert len(server.chats) == 4
        return server.shared_ratio(of="prompt")


def test_four_agents_share_95_percent_of_their_prompts() -> None:
    assert shared_prompts("context_first") >= 0.95


def test_the_same_agents_share_under_10_percent_with_their_prompts_first() -> None:
    with pytest.warns(PrefixBreakWarning, match="role_prompt_first"):
        assert shared_prompts("model") < 0.1


def test_the_same_graph_shares_nothing_when_isolated(server: FakeServer) -> None:
    team = Team(server.url, ROLES)
    with team.session(mode="isolate") as session:
        team_graph(team).invoke({"messages": [("user", DOCUMENT)]})
    team.close()

    assert [chat.header("x-prefillshare-mode") for chat in server.chats] == ["isolate"] * 4
    assert session.usage.cached_tokens == 0
