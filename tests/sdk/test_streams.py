"""Chat streams that are closed, and streams that LangChain reads and that are cut short."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from prefillshare_agents import AsyncSession, Session
from prefillshare_agents.langgraph import ChatPrefillShare, Team
from prefillshare_agents.testing import FakeServer

TASK: Any = {"role": "user", "content": "How far is the moon?"}
TOOL_CALL: Any = {
    "id": "c1",
    "type": "function",
    "function": {"name": "lookup", "arguments": '{"name": "moon", "unit": "km"}'},
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "v", "schema": {"type": "object"}}}
CUT = "role 'solver' ended without a finish_reason"


@pytest.fixture
def model(server: FakeServer) -> Iterator[ChatPrefillShare]:
    made = ChatPrefillShare(model="solver", base_url=server.url, max_retries=0)
    yield made
    made.root_client.close()


def test_a_closed_stream_has_no_more_chunks(server: FakeServer) -> None:
    session = Session("s1", base_url=server.url, messages=[TASK])
    stream = session.chat("solver", stream=True)
    next(stream)
    stream.close()

    assert list(stream) == []
    assert session.messages == (TASK,)
    session.close()


async def test_a_closed_async_stream_has_no_more_chunks(server: FakeServer) -> None:
    session = AsyncSession("s1", base_url=server.url, messages=[TASK])
    stream = await session.chat("solver", stream=True)
    await anext(stream)
    await stream.close()

    assert [chunk async for chunk in stream] == []
    assert session.messages == (TASK,)
    await session.close()


@pytest.mark.parametrize("options", [{}, {"response_format": FORM}])
@pytest.mark.parametrize("has_session", [False, True])
def test_a_stream_that_is_cut_short_raises(
    has_session: bool, options: Any, model: ChatPrefillShare, server: FakeServer
) -> None:
    session = Session("s1") if has_session else None
    server.script(['{"far": true}'])
    server.cut_stream()
    fixed = model.model_copy(update={"session": session})

    with pytest.raises(openai.OpenAIError, match=CUT):
        list(fixed.stream("hello", **options))
    assert session is None or session.calls == ()


@pytest.mark.parametrize("options", [{}, {"response_format": FORM}])
async def test_an_async_stream_that_is_cut_short_raises(
    options: Any, model: ChatPrefillShare, server: FakeServer
) -> None:
    server.script(['{"far": true}'])
    server.cut_stream()

    with pytest.raises(openai.OpenAIError, match=CUT):
        [chunk async for chunk in model.astream("hello", **options)]
    await model.root_async_client.close()


async def test_a_tool_call_that_is_cut_short_never_runs(server: FakeServer) -> None:
    ran: list[str] = []

    @tool
    def lookup(name: str, unit: str = "m") -> str:
        """Look up a distance."""
        ran.append(name)
        return f"384,400 {unit}"

    server.script([{"tool_calls": [TOOL_CALL]}, {"tool_calls": [TOOL_CALL]}])
    server.cut_stream(after=6, times=2)  # behind `{"name": "moon"`
    team = Team(server.url, ["solver"], max_retries=0)
    graph = StateGraph(MessagesState)
    graph.add_node("solver", team.node("solver", tools=[lookup]))
    graph.add_node("tools", ToolNode([lookup]))
    graph.add_edge(START, "solver")
    graph.add_edge("solver", "tools")
    compiled: Any = graph.compile()
    start = {"messages": [TASK]}

    with pytest.raises(openai.OpenAIError, match=CUT):
        list(compiled.stream(start, stream_mode="messages"))
    with pytest.raises(openai.OpenAIError, match=CUT):
        [_ async for _ in compiled.astream(start, stream_mode="messages")]
    assert ran == []
    await team.aclose()
