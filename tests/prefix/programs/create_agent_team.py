"""Four `create_agent` agents after each other, with prompts and tools of their own."""

from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

from prefillshare_agents.testing import tool_call
from prefillshare_prefix import Cause


@tool
def timetable(city: str) -> str:
    """Trains that leave a city."""
    return f"{city}: 9:40, 11:15"


@tool
def prices(train: str) -> str:
    """What a train costs."""
    return f"{train}: 29.50"


TEAM: dict[str, tuple[str, list[Any]]] = {
    "planner": ("Break the task into steps.", []),
    "scout": ("Look up trains. Name at most three.", [timetable]),
    "buyer": ("Compare what they cost.", [prices]),
    "editor": ("Give the traveller one clear recommendation.", []),
}
ANSWERS = {
    "planner": ["First trains, then prices."],
    "scout": [tool_call("timetable", city="Rome"), "9:40 or 11:15."],
    "buyer": [tool_call("prices", train="9:40"), "The one at 9:40 is 29.50."],
    "editor": ["Take the train at 9:40."],
}
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    "context_first": [],
    "model": [
        (1, Cause.ROLE_PROMPT_FIRST),
        (3, Cause.ROLE_PROMPT_FIRST),
        (5, Cause.ROLE_PROMPT_FIRST),
    ],
}


def main() -> None:
    graph = StateGraph(MessagesState)
    before = START
    for name, (prompt, tools) in TEAM.items():
        agent = create_agent(ChatOpenAI(model=name), tools, system_prompt=prompt, name=name)
        graph.add_node(name, agent)
        graph.add_edge(before, name)
        before = name
    task: Any = {"messages": [("user", "How do I get from Rome to Milan tomorrow?")]}
    graph.compile().invoke(task)
