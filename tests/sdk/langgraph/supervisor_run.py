"""A supervisor graph, and its runs in a process of its own: `python -m … URL`."""

import sys
import warnings
from typing import Any

from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

with warnings.catch_warnings():
    # The package still imports what LangGraph has deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from langgraph_supervisor import create_supervisor

from prefillshare_agents.langgraph import Team

MODES = ("full_history", "last_message")
AGENTS = ("researcher", "calculator", "writer")


@tool
def search(name: str) -> str:
    """Look something up."""
    return f"{name}: 384,400 km"


@tool
def compute(expression: str) -> str:
    """Work something out."""
    return "238,855"


def build(team: Team, output_mode: Any) -> Any:
    agents: list[Any] = [
        team.agent(role, instructions=f"You are the {role}.", tools=[search, compute])
        for role in AGENTS
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        graph = create_supervisor(
            agents, model=team.model("supervisor"), prompt="Delegate.", output_mode=output_mode
        )
        return graph.compile(checkpointer=InMemorySaver())


def run(team: Team, output_mode: str) -> None:
    """Ask two questions in one thread."""
    app = build(team, output_mode)
    for question in ("How far is the moon?", "And in miles?"):
        config: Any = {"configurable": {"thread_id": "1"}}
        app.invoke({"messages": [("user", question)]}, config)


if __name__ == "__main__":
    made = Team(sys.argv[1], ["supervisor", *AGENTS])
    for mode in MODES:
        with made.session(mode):
            run(made, mode)
    made.close()
