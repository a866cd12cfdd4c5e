"""Many sessions at once in one graph: no call carries another's."""

import asyncio
import operator
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

from langchain_core.messages import HumanMessage
from langgraph.graph import START, StateGraph
from langgraph.types import Send

from prefillshare_agents.langgraph import Team
from prefillshare_agents.testing import FakeServer

EACH_KIND = 16
BRANCHES = 3


class State(TypedDict):
    messages: Annotated[list[Any], operator.add]


def branching(team: Team) -> Any:
    def branch(state: State) -> list[Send]:
        task = state["messages"][0]
        return [
            Send("solver", {"messages": [task, HumanMessage(f"Way {i}.")]}) for i in range(BRANCHES)
        ]

    graph = StateGraph(State)
    graph.add_node("solver", team.node("solver"))
    graph.add_node("critic", team.agent("critic"))
    graph.add_conditional_edges(START, branch, ["solver"])
    graph.add_edge("solver", "critic")
    return graph.compile()


async def test_32_sessions_in_threads_and_tasks_do_not_mix(team: Team, server: FakeServer) -> None:
    app = branching(team)
    sessions = [team.session(f"session-{i}") for i in range(2 * EACH_KIND)]

    def task(session: Any) -> Any:
        return {"messages": [HumanMessage(f"The task of {session.id}.")]}

    def in_thread(session: Any) -> None:
        with session:
            app.invoke(task(session))

    async def in_task(session: Any) -> None:
        with session:
            await app.ainvoke(task(session))

    together = threading.Event()
    server.delay(together)
    with ThreadPoolExecutor(EACH_KIND) as pool:
        loop = asyncio.get_running_loop()
        runs: list[Any] = [loop.run_in_executor(pool, in_thread, s) for s in sessions[:EACH_KIND]]
        runs += [asyncio.create_task(in_task(session)) for session in sessions[EACH_KIND:]]
        # Every session has a call under way before the first one is answered.
        await asyncio.to_thread(server.wait_for_chats, 2 * EACH_KIND * BRANCHES, 240)
        together.set()
        await asyncio.gather(*runs)
    await team.aclose()

    assert len(server.chats) == 2 * EACH_KIND * (BRANCHES + 1)
    for chat in server.chats:
        assert chat.body["messages"][0]["content"] == f"The task of {chat.sessions[0]}."
    assert {session.usage.calls for session in sessions} == {BRANCHES + 1}
