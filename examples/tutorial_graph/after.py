"""Plan and execute: a planner names the next step, a program does it, until there is an answer."""

from operator import add
from typing import Annotated, Any

from langchain_core.messages import AnyMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel, SecretStr

from examples.react.graph import MAX_TOKENS, ROUNDS, Answer, Plan, Verdict
from examples.react.roles import CALCULATE, INSTRUCTIONS
from examples.react.tools import FACTS, calculator, lookup
from prefillshare_agents.langgraph import ChatPrefillShare


class State(MessagesState):
    heights: Annotated[list[int], add]


def prompt(role: str, messages: list[AnyMessage]) -> list[Any]:
    return [("system", INSTRUCTIONS[role]), *messages]


def model(role: str, base_url: str, output: type[BaseModel]) -> Any:
    schema = {"name": role, "schema": output.model_json_schema(), "strict": True}
    return ChatPrefillShare(
        model=role,
        base_url=base_url,
        api_key=SecretStr("local"),
        temperature=0,
        max_completion_tokens=MAX_TOKENS,
        extra_body={"response_format": {"type": "json_schema", "json_schema": schema}},
    )


def build(base_url: str) -> Any:
    planner = model("planner", base_url, Plan)
    solver = model("solver", base_url, Answer)
    critic = model("critic", base_url, Verdict)

    graph = StateGraph(State)
    graph.add_node("plan", lambda state: ask(planner, "planner", state))
    graph.add_node("execute", execute)
    graph.add_node("answer", lambda state: ask(solver, "solver", state))
    graph.add_node("review", lambda state: ask(critic, "critic", state))
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "execute")
    graph.add_conditional_edges("execute", after_step, ["plan", "answer"])
    graph.add_edge("answer", "review")
    graph.add_edge("review", END)
    return graph.compile(checkpointer=InMemorySaver())


def ask(llm: Any, role: str, state: State) -> dict[str, Any]:
    return {"messages": [llm.invoke(prompt(role, state["messages"]))]}


def execute(state: State) -> dict[str, Any]:
    """Look up the planned height, or divide the greatest of those looked up by the least."""
    plan: Any = Plan.model_validate_json(state["messages"][-1].text)
    if plan.next != CALCULATE:
        said = lookup.invoke({"place": plan.next})
        return {"messages": [HumanMessage(said)], "heights": [FACTS[plan.next]["height_m"]]}
    if not state["heights"]:
        return {"messages": [HumanMessage("No height is known.")]}
    expression = f"{max(state['heights'])} / {min(state['heights'])}"
    return {"messages": [HumanMessage(calculator.invoke({"expression": expression}))]}


def after_step(state: State) -> str:
    steps = sum(message.type == "ai" for message in state["messages"])
    calculated = " = " in state["messages"][-1].text
    return "answer" if calculated or steps == ROUNDS else "plan"
