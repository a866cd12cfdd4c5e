"""Actor, evaluator and self-reflector, with a memory that only grows.

The memory is the graph's `messages`: the question, each reflection, and what came of it. An
attempt branches off it and is dropped unless the evaluator accepts it, so the memory stays the
common beginning of every prompt.
"""

from operator import add
from typing import Annotated, Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from examples.react.graph import Plan, Verdict, specialist
from examples.react.roles import CALCULATE
from examples.react.tools import calculator, lookup
from prefillshare_agents.langgraph import Team

ROLES = ("solver", "critic", "planner", "toolcaller")

ATTEMPTS = 5
"""Attempts before the last one is left standing; four are needed."""

NOT_CALCULATED = Verdict(reason="Nothing was calculated, so it is a guess", verdict="wrong")
"""The verdict on an attempt that there is nothing to check by."""


class State(MessagesState):
    """`messages` is the memory; an attempt and its verdict are no part of it."""

    attempt: list[AIMessage]
    verdict: list[AIMessage]
    attempts: Annotated[int, add]


def build(team: Team) -> Any:
    """Return the compiled graph."""

    solver = specialist(team, "solver")
    critic = specialist(team, "critic")

    def actor(state: State) -> dict[str, Any]:
        return {"attempt": solver.invoke(state)["messages"], "attempts": 1}

    def evaluator(state: State) -> dict[str, Any]:
        if not calculated(state):
            return {"verdict": [AIMessage(NOT_CALCULATED.model_dump_json(), name="program")]}
        branch = [*state["messages"], *state["attempt"]]
        return {"verdict": critic.invoke({"messages": branch})["messages"]}

    graph = StateGraph(State)
    graph.add_node("actor", actor)
    graph.add_node("evaluator", evaluator)
    graph.add_node("reflector", specialist(team, "planner"))
    graph.add_node("look_up", look_up)
    graph.add_node("toolcaller", specialist(team, "toolcaller"))
    graph.add_node("tools", ToolNode([lookup, calculator], handle_tool_errors=True))
    graph.add_edge(START, "actor")
    graph.add_edge("actor", "evaluator")
    graph.add_conditional_edges("evaluator", after_evaluator, ["reflector", END])
    graph.add_conditional_edges("reflector", after_reflector, ["look_up", "toolcaller"])
    graph.add_edge("toolcaller", "tools")
    graph.add_edge("look_up", "actor")
    graph.add_edge("tools", "actor")
    return graph.compile()


def look_up(state: State) -> dict[str, Any]:
    """The height that the latest reflection asks for."""
    said = lookup.invoke({"place": missing(state)})
    return {"messages": [HumanMessage(said, name="lookup")]}


def missing(state: State) -> str:
    """What the latest reflection says is missing: a place, or `CALCULATE`."""
    plan: Any = Plan.model_validate_json(state["messages"][-1].text)
    return str(plan.next)


def calculated(state: State) -> bool:
    """Whether the calculator has spoken since the last reflection."""
    last = state["messages"][-1]
    return (
        isinstance(last, ToolMessage) and last.name == calculator.name and last.status == "success"
    )


def after_reflector(state: State) -> Literal["look_up", "toolcaller"]:
    return "toolcaller" if missing(state) == CALCULATE else "look_up"


def after_evaluator(state: State) -> str:
    judged = Verdict.model_validate_json(state["verdict"][-1].text)
    done = judged.verdict == "right" or state["attempts"] == ATTEMPTS
    return END if done else "reflector"
