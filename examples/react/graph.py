"""A ReAct graph of four specialists over one context.

    planner ──► toolcaller ──► tools ──┬─► planner    (the calculator has not spoken yet)
                                       └─► solver ──► critic ──► end, or once more the solver

Think (planner), act (toolcaller), observe (tools) until the calculator has spoken; then answer
(solver) and judge (critic). Every model call is another role's than the one before.

What comes next, which tool gets which arguments, which number is the answer and whether it is
right: each role decides that alone. Guided decoding only holds the form, so that roles that were
not trained for their job cannot break the graph; those that were would write it anyway.
"""

from typing import Annotated, Any, Literal

from langchain_core.messages import ToolMessage
from langchain_core.runnables import Runnable
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel, Field, ValidationError, create_model

from examples.react.roles import CALCULATE, INSTRUCTIONS, ROLES, TOOLS
from examples.react.tools import FACTS, calculator, lookup
from prefillshare_agents.langgraph import Team

ROUNDS = 4
"""Tool calls, after which the solver must make do with what is there; three are needed."""

ATTEMPTS = 2
"""Answers of the solver before the critic's objection is left standing."""

MAX_TOKENS = 160
"""Room for any answer the schemas allow, also where every character is a token."""

# Left free, an untrained small model goes on until it is cut off.
Sentence = Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9 ',.]{3,99}$")]


class Answer(BaseModel):
    """What the solver says."""

    answer: Sentence


class Verdict(BaseModel):
    """What the critic says."""

    reason: Sentence
    verdict: Literal["right", "wrong"]


_NEXT: Any = Literal[*FACTS, CALCULATE]
Plan = create_model("Plan", thought=(Sentence, ...), next=(_NEXT, ...))
"""What the planner says: a thought, and any place that can be looked up, or `CALCULATE`."""


OUTPUTS: dict[str, type[BaseModel]] = {"planner": Plan, "solver": Answer, "critic": Verdict}
"""Role → the form of its answers."""


def specialist(team: Team, role: str) -> Runnable[Any, Any]:
    """Return the node of a role: with the words it was trained on, in the form it was trained to.

    Guided decoding holds the form; what stands in it is the role's own.
    """
    options: dict[str, Any] = {"output": OUTPUTS.get(role)}
    if role in TOOLS:
        options = {
            "tools": TOOLS[role],
            "tool_choice": "required",
            "extra_body": {"parallel_tool_calls": False},
        }
    return team.node(
        role,
        instructions=INSTRUCTIONS[role],
        max_tokens=MAX_TOKENS,
        temperature=0,
        # Who wrote what would stand in the prompt, and did not when the specialists were trained.
        speakers=False,
        **options,
    )


def build(team: Team) -> Any:
    """Return the compiled graph."""
    graph = StateGraph(MessagesState)
    for role in ROLES:
        graph.add_node(role, specialist(team, role))
    # A place nobody knows, a division by zero: what went wrong is an observation too.
    graph.add_node("tools", ToolNode([lookup, calculator], handle_tool_errors=True))
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "toolcaller")
    graph.add_edge("toolcaller", "tools")
    graph.add_conditional_edges("tools", after_tools, ["planner", "solver"])
    graph.add_edge("solver", "critic")
    graph.add_conditional_edges("critic", after_critic, ["solver", END])
    return graph.compile()


def after_tools(state: MessagesState) -> Literal["planner", "solver"]:
    last = state["messages"][-1]
    calculated = (
        isinstance(last, ToolMessage) and last.name == calculator.name and last.status == "success"
    )
    rounds = sum(item.name == "planner" for item in state["messages"])
    return "solver" if calculated or rounds == ROUNDS else "planner"


def after_critic(state: MessagesState) -> str:
    attempts = sum(item.name == "solver" for item in state["messages"])
    try:
        judged = Verdict.model_validate_json(state["messages"][-1].text)
    except ValidationError:  # cut off: between JSON's parts, blanks are free
        return END
    return "solver" if judged.verdict == "wrong" and attempts < ATTEMPTS else END
