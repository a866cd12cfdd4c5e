"""Users' programs are checked strictly: what works passes, what is misspelt does not."""

import subprocess
import sys
from pathlib import Path

import pytest

RIGHT = """
from collections.abc import Iterator
from openai.types.chat import ChatCompletion
from prefillshare_agents import (
    AsyncChatStream, AsyncOpenAI, AsyncSession, OpenAI, Session, SessionUsage
)

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="local", session="s", max_retries=1)
session: Session = client.session("s", token_budget=5, messages=[{"role": "user", "content": "x"}])
answer: ChatCompletion = session.chat("critic", temperature=0)
usage: SessionUsage = session.usage

def texts(stream: bool) -> Iterator[str]:
    result = session.chat("critic", stream=stream)
    if isinstance(result, ChatCompletion):
        yield result.choices[0].message.content or ""
    else:
        for chunk in result:
            yield chunk.choices[0].delta.content or ""

async def ask() -> None:
    async with AsyncOpenAI(api_key="local").session() as block:
        await block.chat("critic")

async def stream(session: AsyncSession) -> str:
    chunks: AsyncChatStream = await session.chat("critic", stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

async def load() -> tuple[Session, AsyncSession]:
    restored = Session.load("s.json", base_url="http://127.0.0.1:8000/v1", token_budget=5)
    return restored, await AsyncSession.load("s.json", client=AsyncOpenAI(), context_window=None)
"""
RIGHT_GRAPH = """
from typing import Any
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from prefillshare_agents import AsyncSession, Session
from prefillshare_agents.langgraph import BoundGraph, ChatPrefillShare, Team, bind, session_config

def key() -> str:
    return "local"

def build(team: Team, session: Session | AsyncSession | str) -> BoundGraph:
    graph = StateGraph(MessagesState)
    graph.add_node("critic", team.node("critic", instructions="Judge.", temperature=0))
    graph.add_node("solver", team.agent("solver", temperature=0))
    graph.add_edge(START, "critic")
    return bind(graph.compile(), session)

with Team("http://127.0.0.1:8000/v1", ["critic", "solver"], api_key=key, timeout=5.0,
          max_retries=1, default_headers={"X-Trace": "1"}, on_prefix_break="raise") as team:
    session: Session = team.session(thread_id=7, mode="isolate", token_budget=5)
    build(team, session).invoke({"messages": []}, session_config("s", tags=["x"]))
    asession: AsyncSession = team.asession("s", prefill=True)

model = ChatPrefillShare(model="critic", base_url="http://127.0.0.1:8000/v1", session=session,
                         role="judge", temperature=0, api_key=key, on_prefix_break="ignore")
answer: AIMessage = model.invoke("hello")

async def ask() -> str:
    async with Team("http://127.0.0.1:8000/v1", {"critic": "critic-v2"}) as team:
        return (await team.model("critic").ainvoke("hello")).text
"""
RIGHT_TESTING = """
from prefillshare_agents.testing import Answer, FakeServer, Request, tool_call

def answer(request: Request) -> str:
    return f"I am {request.role}."

with FakeServer(["critic"], layout="model", block_size=16, strict_script=True) as server:
    server.script(["Yes.", tool_call("search", name="moon"), answer])
    roles: list[str | None] = [request.role for request in server.chats]
    server.assert_shared(1.0)
"""
WRONG = """
import asyncio
from prefillshare_agents import AsyncSession, OpenAI, Session

OpenAI(base_ulr="x")
OpenAI(max_retries="three")
OpenAI(on_prefix_break="shout")
OpenAI().session("s", token_budgett=4)
Session().chat()
Session.load("s.json", token_budgett=4)
Session.load("s.json", messages=[])
asyncio.run(AsyncSession.load("s.json", client=OpenAI()))
asyncio.run(AsyncSession.load("s.json", token_budgett=4))
asyncio.run(AsyncSession().chat("critic", stream="yes"))
"""
WRONG_GRAPH = """
from prefillshare_agents.langgraph import ChatPrefillShare, Team, bind, session_config

Team("http://127.0.0.1:8000/v1")
Team("http://127.0.0.1:8000/v1", ["critic"], timeoutt=5)
Team("http://127.0.0.1:8000/v1", ["critic"], max_retries="three")
Team("http://127.0.0.1:8000/v1", ["critic"], on_prefix_break="shout")
Team("http://127.0.0.1:8000/v1", ["critic"]).session(token_budgett=4)
Team("http://127.0.0.1:8000/v1", ["critic"]).session(mode="alone")
Team("http://127.0.0.1:8000/v1", ["critic"]).asession(thread_id=[1])
Team("http://127.0.0.1:8000/v1", ["critic"]).node("critic", instructions=4)
ChatPrefillShare(model="critic", sesion="s")
ChatPrefillShare(model="critic", session=4)
ChatPrefillShare(model="critic", on_prefix_break="shout")
bind(ChatPrefillShare(model="critic"), 4)
session_config(4)
"""
WRONG_TESTING = """
from prefillshare_agents.testing import FakeServer, tool_call

FakeServer(layuot="model")
FakeServer(layout="theirs")
FakeServer().script(4.5)
FakeServer().fail("often")
tool_call(4)
"""

RIGHT_PROGRAMS = {"right": RIGHT, "right_graph": RIGHT_GRAPH, "right_testing": RIGHT_TESTING}
WRONG_PROGRAMS = {"wrong": WRONG, "wrong_graph": WRONG_GRAPH, "wrong_testing": WRONG_TESTING}


@pytest.mark.timeout(600)
def test_a_users_program_is_typed_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    pytest.importorskip("langgraph")
    programs = {f"{name}.py": text for name, text in {**RIGHT_PROGRAMS, **WRONG_PROGRAMS}.items()}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", *programs],
        cwd=tmp_path,
        env={"MYPYPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    lines = {line.partition(": error")[0] for line in done.stdout.splitlines() if ": error" in line}

    expected = {
        f"{name}.py:{number}"
        for name, text in WRONG_PROGRAMS.items()
        for number, line in enumerate(text.splitlines(), 1)
        if "(" in line
    }
    assert lines == expected, done.stdout
