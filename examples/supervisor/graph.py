"""A supervisor and three specialists; each specialist works on a history of its own.

All histories begin with the question and part behind it: what one specialist reads and writes, the
others do not see. So little is shared, and that little is still computed once.
"""

from operator import add
from typing import Annotated, Any

from langchain_core.messages import AnyMessage, HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from examples.react.graph import ROUNDS, Plan, specialist
from examples.react.roles import CALCULATE
from examples.react.tools import calculator, lookup
from prefillshare_agents.langgraph import Team

ROLES = ("planner", "toolcaller", "solver", "critic")

SPECIALISTS = ("researcher", "analyst", "checker")


class State(MessagesState):
    """`messages` is the supervisor's history; the rest is what the specialists added to theirs."""

    researcher: Annotated[list[AnyMessage], add]
    analyst: Annotated[list[AnyMessage], add]
    checker: Annotated[list[AnyMessage], add]


def build(team: Team) -> Any:
    """Return the compiled graph."""
    planner, toolcaller, solver, critic = (specialist(team, role) for role in ROLES)
    tools = ToolNode([lookup, calculator], handle_tool_errors=True)

    def supervisor(state: State) -> dict[str, Any]:
        """Name the next step; when the analyst has reported, there is nothing left to name."""
        return {} if reports(state, "analyst") else dict(planner.invoke(state))

    def researcher(state: State) -> dict[str, Any]:
        """Look up one place, after those looked up before."""
        question, *_, order = state["messages"]
        new = [order, *work([question, *state["researcher"], order], toolcaller, tools)]
        return {"researcher": new, "messages": [report("researcher", new[-1])]}

    def analyst(state: State) -> dict[str, Any]:
        """Divide the heights that the researcher reported, and put the result in words."""
        question, *_, order = state["messages"]
        given = hand_over(*reports(state, "researcher"), order)
        new = work([question, given], toolcaller, tools, solver)
        done = [report("calculator", new[-2]), report("analyst", new[-1])]
        return {"analyst": new, "messages": done}

    def checker(state: State) -> dict[str, Any]:
        """Compare the analyst's words with the calculation, knowing nothing else."""
        question, *_, calculation, answer = state["messages"]
        new = work([question, hand_over(calculation, answer)], critic)
        return {"checker": new, "messages": [report("checker", new[-1])]}

    graph = StateGraph(State)
    graph.add_node("supervisor", supervisor)
    graph.add_node("researcher", researcher)
    graph.add_node("analyst", analyst)
    graph.add_node("checker", checker)
    graph.add_edge(START, "supervisor")
    graph.add_conditional_edges("supervisor", next_specialist, [*SPECIALISTS, END])
    for name in SPECIALISTS:
        graph.add_edge(name, "supervisor")
    return graph.compile()


def work(history: list[AnyMessage], *steps: Any) -> list[AnyMessage]:
    """Return what the steps, one after the other, add to a history."""
    new: list[AnyMessage] = []
    for step in steps:
        new += step.invoke({"messages": [*history, *new]})["messages"]
    return new


def hand_over(*messages: AnyMessage) -> HumanMessage:
    """What a specialist is given beside the question, in one message of its own history."""
    return HumanMessage("\n".join(str(message.text) for message in messages))


def report(name: str, message: AnyMessage) -> HumanMessage:
    """What the supervisor gets to read of a specialist's history."""
    return HumanMessage(str(message.text), name=name)


def reports(state: State, name: str) -> list[AnyMessage]:
    return [message for message in state["messages"] if message.name == name]


def next_specialist(state: State) -> str:
    if reports(state, "checker"):
        return END
    if reports(state, "analyst"):
        return "checker"
    plan: Any = Plan.model_validate_json(state["messages"][-1].text)
    done = plan.next == CALCULATE or len(reports(state, "researcher")) == ROUNDS
    return "analyst" if done else "researcher"
