"""`langgraph_supervisor`: a supervisor hands over to two agents and gets their last word back."""

from typing import Any, Literal

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph_supervisor import create_supervisor

from prefillshare_agents.testing import tool_call
from prefillshare_prefix import Cause

ANSWERS = {
    "supervisor": [
        tool_call("transfer_to_scout"),
        tool_call("transfer_to_buyer"),
        "Take the train at 9:40 for 29.50.",
    ],
    "scout": [tool_call("timetable", city="Rome"), "There are trains at 9:40 and 11:15."],
    "buyer": [tool_call("prices", train="9:40"), "The earlier one costs 29.50."],
}
# What an agent did on its way is in its own context only, a fork of the one that all share.
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    "context_first": [],
    "model": [(1, Cause.ROLE_PROMPT_FIRST), (4, Cause.ROLE_PROMPT_FIRST)],
}


@tool
def timetable(city: str) -> str:
    """Trains that leave a city."""
    return f"{city}: 9:40, 11:15"


@tool
def prices(train: str) -> str:
    """What a train costs."""
    return f"{train}: 29.50"


def run(output_mode: Literal["last_message", "full_history"]) -> None:
    agents: list[Any] = [
        create_agent(ChatOpenAI(model=name), [use], system_prompt=prompt, name=name)
        for name, use, prompt in (
            ("scout", timetable, "Look up trains. Name at most three."),
            ("buyer", prices, "Compare what journeys cost."),
        )
    ]
    supervisor = create_supervisor(
        agents,
        model=ChatOpenAI(model="supervisor"),
        prompt="Decide who works next, and answer when all is known.",
        output_mode=output_mode,
    )
    supervisor.compile().invoke({"messages": [("user", "How do I get from Rome to Milan?")]})


def main() -> None:
    run("last_message")
