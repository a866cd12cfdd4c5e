"""Agents that hand the conversation to each other; no node stands above them.

Every agent reads the whole conversation, answers, and names who speaks next. The tool caller does
that by the tool it calls, since the tools here are hand-offs. Who spoke last also hears the user's
next message first.
"""

from typing import Annotated, Any

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, InjectedToolCallId, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command

from examples.react import tools as react
from examples.react.graph import ATTEMPTS, ROUNDS, Verdict, specialist
from prefillshare_agents.langgraph import Team

ROLES = ("planner", "toolcaller", "solver", "critic")


class State(MessagesState):
    active: str
    """Whose turn it is, also when the user writes again."""


def build(team: Team) -> Any:
    """Return the compiled graph; it remembers its threads."""
    planner, toolcaller, solver, critic = (specialist(team, role) for role in ROLES)

    def plan(state: State) -> Command[Any]:
        """Say what is missing, for the tool caller to get; after `ROUNDS` of it, stop asking."""
        rounds = sum(message.name == "planner" for message in state["messages"])
        return hand_off("toolcaller" if rounds < ROUNDS else "solver", planner.invoke(state))

    def solve(state: State) -> Command[Any]:
        return hand_off("critic", solver.invoke(state))

    def judge(state: State) -> Command[Any]:
        """End with a right answer, and give a wrong one back, once."""
        update = critic.invoke(state)
        judged = Verdict.model_validate_json(update["messages"][-1].text)
        attempts = sum(message.name == "solver" for message in state["messages"])
        if judged.verdict == "wrong" and attempts < ATTEMPTS:
            return hand_off("solver", update)
        return Command(goto=END, update=update)

    graph = StateGraph(State)
    graph.add_node("planner", plan, destinations=("toolcaller", "solver"))
    graph.add_node("toolcaller", toolcaller)
    graph.add_node("tools", ToolNode([lookup, calculator]), destinations=("planner", "solver"))
    graph.add_node("solver", solve, destinations=("critic",))
    graph.add_node("critic", judge, destinations=("solver", END))
    graph.add_conditional_edges(START, lambda state: state.get("active", "planner"), list(ROLES))
    graph.add_edge("toolcaller", "tools")
    return graph.compile(checkpointer=InMemorySaver())


def hand_off(to: str, update: dict[str, Any]) -> Command[Any]:
    """Add to the conversation and give it to another agent."""
    return Command(goto=to, update={**update, "active": to})


@tool
def lookup(place: str, call: Annotated[str, InjectedToolCallId]) -> Command[Any]:
    """Give the height of a place, and the conversation to the planner."""
    return hand_off("planner", observed(react.lookup, {"place": place}, call))


@tool
def calculator(expression: str, call: Annotated[str, InjectedToolCallId]) -> Command[Any]:
    """Work out an expression, and give the conversation to the solver."""
    return hand_off("solver", observed(react.calculator, {"expression": expression}, call))


def observed(inner: BaseTool, arguments: dict[str, str], call: str) -> dict[str, Any]:
    """What a tool of the ReAct example says; what it refuses is an observation too."""
    try:
        said = str(inner.invoke(arguments))
    except (ValueError, ZeroDivisionError) as error:
        said = f"Error: {error}"
    return {"messages": [ToolMessage(said, name=inner.name, tool_call_id=call)]}
