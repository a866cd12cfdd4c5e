"""A ReAct graph: one agent, a tool node, and back until there is no more to look up."""

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from prefillshare_agents.testing import tool_call
from prefillshare_prefix import Cause

ANSWERS = [
    tool_call("population", city="Forlì"),
    tool_call("population", city="Cesena"),
    "Forlì is larger than Cesena.",
]
BREAKS: dict[str, list[tuple[int, Cause]]] = {"context_first": [], "model": []}


@tool
def population(city: str) -> str:
    """How many people live in a city."""
    return f"{city}: {len(city) * 19_500}"


def main() -> None:
    model = ChatOpenAI(model="agent").bind_tools([population])

    def agent(state: MessagesState) -> MessagesState:
        system = ("system", "Look facts up before you answer.")
        return {"messages": [model.invoke([system, *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode([population]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    graph.compile().invoke({"messages": [HumanMessage("Which is larger, Forlì or Cesena?")]})
