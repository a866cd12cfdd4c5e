"""A session's limits hold for the graph that runs in it."""

import operator
import threading
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send

from prefillshare_agents import AsyncSession, ContextWindowError, Session, TokenBudgetError
from prefillshare_agents.langgraph import ChatPrefillShare, Team, bind
from prefillshare_agents.testing import FakeServer

TASK: Any = {"messages": [("user", "How far is the moon?")]}
HELLO: Any = {"role": "user", "content": "hello"}
BRANCHES = 4


class Together(TypedDict):
    messages: Annotated[list[Any], operator.add]


class Refusal(BaseCallbackHandler):
    """Waited for by the answers of the calls that are not refused."""

    def __init__(self) -> None:
        self.came = threading.Event()

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.came.set()


def looping(team: Team) -> Any:
    """A graph that does not end by itself."""
    graph = StateGraph(MessagesState)
    graph.add_node("solver", team.node("solver", max_tokens=16))
    graph.add_edge(START, "solver")
    graph.add_edge("solver", "solver")
    return graph.compile()


def branching(team: Team, **options: Any) -> Any:
    def branch(state: Any) -> list[Send]:
        return [Send("solver", {"messages": state["messages"]}) for _ in range(BRANCHES)]

    graph = StateGraph(Together)
    graph.add_node("solver", team.node("solver", **options))
    graph.add_conditional_edges(START, branch, ["solver"])
    return graph.compile()


def spent(session: Session | AsyncSession) -> int:
    return session.usage.prompt_tokens + session.usage.completion_tokens


RUNS: dict[str, Callable[[Any], Any]] = {
    "invoke": lambda graph: graph.invoke(TASK),
    "stream": lambda graph: list(graph.stream(TASK, stream_mode="messages")),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_budget_ends_a_graph_that_does_not_end_itself(
    run: str, team: Team, server: FakeServer
) -> None:
    with team.session(token_budget=300) as session, pytest.raises(TokenBudgetError):
        RUNS[run](looping(team))

    assert len(server.chats) == session.usage.calls > 1
    assert spent(session) <= 300


async def test_a_budget_ends_an_asynchronous_graph(team: Team, server: FakeServer) -> None:
    with team.session(token_budget=300) as session, pytest.raises(TokenBudgetError):
        await looping(team).ainvoke(TASK)
    async with team.asession(token_budget=300) as asynchronous:
        with pytest.raises(TokenBudgetError):
            async for _ in looping(team).astream(TASK, stream_mode="messages"):
                pass
    await team.aclose()

    assert len(server.chats) == session.usage.calls + asynchronous.usage.calls > 2
    assert spent(session) <= 300


def test_branches_at_once_do_not_exceed_the_budget_together(team: Team, server: FakeServer) -> None:
    refusal = Refusal()
    server.delay(refusal.came)
    app = branching(team, max_tokens=60)
    with team.session(token_budget=150) as session, pytest.raises(TokenBudgetError):
        app.invoke(TASK, {"callbacks": [refusal]})

    assert spent(session) <= 150


async def test_asynchronous_branches_at_once_do_not_either(team: Team, server: FakeServer) -> None:
    refusal = Refusal()
    server.delay(refusal.came)
    app = branching(team, max_tokens=60)
    async with team.asession(token_budget=150) as session:
        with pytest.raises(TokenBudgetError):
            await app.ainvoke(TASK, {"callbacks": [refusal]})
    await team.aclose()

    assert spent(session) <= 150


@pytest.mark.parametrize("server", [{"max_model_len": 200}], indirect=True)
def test_branches_without_a_limit_of_their_own_share_a_budget_with_room_for_all(
    team: Team, server: FakeServer
) -> None:
    with team.session(token_budget=BRANCHES * 200) as session:
        branching(team).invoke(TASK)

    assert session.usage.calls == BRANCHES


@pytest.mark.parametrize("server", [{"max_model_len": 800}], indirect=True)
async def test_a_nodes_call_over_the_window_is_not_sent(team: Team, server: FakeServer) -> None:
    task = {"messages": [HumanMessage("far " * 900)]}
    with team.session():
        with pytest.raises(ContextWindowError, match=r"role 'solver': .* window is 800"):
            team.node("solver").invoke(task)
        with pytest.raises(ContextWindowError):
            await team.node("critic").ainvoke(task)
    await team.aclose()

    assert server.chats == []


def test_a_bound_graph_keeps_to_its_sessions_budget(team: Team, server: FakeServer) -> None:
    session = team.session(token_budget=300)
    with pytest.raises(TokenBudgetError):
        list(bind(looping(team), session).stream(TASK))

    assert len(server.chats) == session.usage.calls


def test_a_threads_session_has_no_limits_and_asks_for_no_counts(
    team: Team, server: FakeServer
) -> None:
    task = {"messages": [HumanMessage("far " * 900)]}
    team.node("solver").invoke(task, {"configurable": {"thread_id": "order-4711"}})
    bind(team.node("solver"), "s1").invoke(task)

    assert [request.path for request in server.requests] == ["/v1/chat/completions"] * 2


async def test_a_call_counts_once_under_its_models_role(server: FakeServer) -> None:
    model = ChatPrefillShare(model="critic-v2", role="critic", base_url=server.url)
    with Session() as session:
        model.invoke("hello")
        list(model.stream("hello"))
        list(model.model_copy(update={"include_response_headers": True}).stream("hello"))
        await model.ainvoke("hello")
        async for _ in model.astream("hello"):
            pass
        model.root_client.chat.completions.create(model="critic-v2", messages=[HELLO])
    await model.root_async_client.close()

    assert [call.role for call in session.calls] == ["critic"] * 5 + ["critic-v2"]
    assert all(call.wall_s > 0 for call in session.calls)
