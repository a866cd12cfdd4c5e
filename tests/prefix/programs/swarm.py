"""`langgraph_swarm`: two agents that hand the conversation to each other over several turns."""

from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph_swarm import create_handoff_tool, create_swarm

from prefillshare_agents.testing import tool_call
from prefillshare_prefix import Cause

ANSWERS = {
    "sales": [tool_call("transfer_to_support"), "Yes, we sell returns too."],
    "support": ["Turn it off and on again.", tool_call("transfer_to_sales")],
}
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    "context_first": [],
    "model": [(1, Cause.ROLE_PROMPT_FIRST)],
}


def main() -> None:
    agents: Any = [
        create_agent(
            ChatOpenAI(model=name),
            [create_handoff_tool(agent_name=other)],
            system_prompt=prompt,
            name=name,
        )
        for name, other, prompt in (
            ("sales", "support", "You sell tickets."),
            ("support", "sales", "You help where something does not work."),
        )
    ]
    swarm = create_swarm(agents, default_active_agent="sales")
    graph = swarm.compile(checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "1"}}
    for question in ("My ticket machine is broken.", "Can I buy a return there?"):
        graph.invoke({"messages": [("user", question)]}, thread)
