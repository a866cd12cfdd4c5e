"""A graph that waits for a human, and its first half in a process of its own.

`python -m … URL KIND=LOCATION …` runs it with each checkpointer until the interrupt, and exits.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from langchain_core.tools import tool
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.types import interrupt

from prefillshare_agents.langgraph import Team

ASYNC = {"async-sqlite", "async-postgres"}


@tool
def ask_human(question: str) -> str:
    """Ask a human."""
    return str(interrupt(question))


@asynccontextmanager
async def saver_of(kind: str, location: str) -> AsyncIterator[Any]:
    if kind == "sqlite":
        with SqliteSaver.from_conn_string(location) as saver:
            yield saver
    elif kind == "async-sqlite":
        async with AsyncSqliteSaver.from_conn_string(location) as async_saver:
            yield async_saver
    elif kind == "postgres":
        from langgraph.checkpoint.postgres import PostgresSaver

        with PostgresSaver.from_conn_string(location) as postgres:
            postgres.setup()
            yield postgres
    else:
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver

        async with AsyncPostgresSaver.from_conn_string(location) as async_postgres:
            await async_postgres.setup()
            yield async_postgres


async def run(url: str, kind: str, location: str, given: Any) -> Any:
    """Give the graph a task, or what it waits for. The thread is named after the checkpointer."""
    team = Team(url, ["planner"])
    config: Any = {"configurable": {"thread_id": kind}}
    async with saver_of(kind, location) as saver:
        app = team.agent("planner", instructions="Ask.", tools=[ask_human], checkpointer=saver)
        if kind in ASYNC:
            state = await app.ainvoke(given, config)
        else:
            state = app.invoke(given, config)
    await team.aclose()
    return state


if __name__ == "__main__":
    for place in sys.argv[2:]:
        name, _, where = place.partition("=")
        task = {"messages": [("user", f"A task for {name}.")]}
        asyncio.run(run(sys.argv[1], name, where, task))
