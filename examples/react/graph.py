"""A ReAct graph of four specialists over one context.

    planner ──► toolcaller ──► tools ──┬─► planner    (a height is still missing)
                                       └─► solver ──► critic ──► end, or once more the solver

Think (planner), act (toolcaller), observe (tools) until the calculator has spoken; then answer
(solver) and judge (critic). Every model call is another role's than the one before.

A model of 135M parameters is no agent. Guided decoding keeps it on the rails: each call gets a
JSON schema or a forced tool whose choices the graph narrows to what makes sense next.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from langchain_core.messages import AnyMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel, Field, create_model

from examples.react.tools import FACTS, calculator, lookup, narrowed
from prefillshare_agents.langgraph import Team

ROLES = ("planner", "toolcaller", "solver", "critic")
ATTEMPTS = 2
"""Answers of the solver before the critic's objection is left standing."""

CALCULATE = "calculate"

MAX_TOKENS = 160
"""Room for any answer the schemas allow, also where every character is a token."""

# Left free, a small model goes on until it is cut off, and fills a thought with digits.
Thought = Annotated[str, Field(pattern=r"^[A-Z][A-Za-z ',]{3,47}$")]
Sentence = Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9 ',.]{3,59}$")]


class Answer(BaseModel):
    """What the solver says."""

    answer: Sentence


class Verdict(BaseModel):
    """What the critic says."""

    reason: Sentence
    verdict: Literal["right", "wrong"]


def build(team: Team) -> Any:
    """Return the compiled graph."""

    def planner(state: MessagesState, config: RunnableConfig) -> Any:
        known = looked_up(state["messages"])
        missing = [place for place in FACTS if place not in known]
        if len(known) < 2:
            ask = (
                "Think in one short sentence, then say which place named in the question "
                "has to be looked up next."
            )
            choices = missing
        else:
            ask = "Both heights are known. Think in one short sentence, then say what to do next."
            choices = [CALCULATE]
        node = team.node(
            "planner",
            instructions=ask,
            output=plan_of(choices),
            max_tokens=MAX_TOKENS,
            temperature=0,
        )
        return node.invoke(state, config)

    def toolcaller(state: MessagesState, config: RunnableConfig) -> Any:
        step = json.loads(state["messages"][-1].text)["next"]
        if step == CALCULATE:
            known = looked_up(state["messages"])[:2]
            low, high = sorted(FACTS[place]["height_m"] for place in known)
            quotients = [f"{high} / {low}", f"{low} / {high}"]
            tool, spec = calculator, narrowed(calculator, "expression", quotients)
            ask = "Divide the larger height by the smaller one."
        else:
            tool, spec = lookup, narrowed(lookup, "place", [step])
            ask = "Look up the place that was named last."
        node = team.node(
            "toolcaller",
            instructions=ask,
            tools=[spec],
            tool_choice=tool.name,
            max_tokens=MAX_TOKENS,
            temperature=0,
        )
        return node.invoke(state, config)

    graph = StateGraph(MessagesState)
    graph.add_node("planner", planner)
    graph.add_node("toolcaller", toolcaller)
    graph.add_node("tools", ToolNode([lookup, calculator]))
    graph.add_node(
        "solver",
        team.node(
            "solver",
            instructions="How many times higher is it? Answer in one sentence.",
            output=Answer,
            max_tokens=MAX_TOKENS,
            temperature=0,
        ),
    )
    graph.add_node(
        "critic",
        team.node(
            "critic",
            instructions=(
                "Judge the answer. It is right when it gives the number after the equals sign."
            ),
            output=Verdict,
            max_tokens=MAX_TOKENS,
            temperature=0,
        ),
    )
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "toolcaller")
    graph.add_edge("toolcaller", "tools")
    graph.add_conditional_edges("tools", after_tools, ["planner", "solver"])
    graph.add_edge("solver", "critic")
    graph.add_conditional_edges("critic", after_critic, ["solver", END])
    return graph.compile()


def plan_of(choices: Sequence[str]) -> type[BaseModel]:
    """Return the planner's output format: a thought, then one of `choices`."""
    choice: Any = Literal[*choices]
    return create_model("Plan", thought=(Thought, ...), next=(choice, ...))


def looked_up(messages: Sequence[AnyMessage]) -> list[str]:
    """Return the places whose heights are in the context, in order."""
    return [item.artifact for item in messages if isinstance(item, ToolMessage) and item.artifact]


def after_tools(state: MessagesState) -> Literal["planner", "solver"]:
    return "solver" if state["messages"][-1].name == calculator.name else "planner"


def after_critic(state: MessagesState) -> str:
    attempts = sum(item.name == "solver" for item in state["messages"])
    judged = Verdict.model_validate_json(state["messages"][-1].text)
    return "solver" if judged.verdict == "wrong" and attempts < ATTEMPTS else END
