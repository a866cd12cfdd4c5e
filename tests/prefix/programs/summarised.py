"""`create_agent` with `SummarizationMiddleware`: old turns become a summary when there are many."""

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

from prefillshare_prefix import Cause

ANSWERS = {
    "guide": [f"Answer {i}, which has a few words." for i in range(4)],
    "summariser": ["The traveller wants trains and hotels."],
}
# The summariser is asked about the conversation, in another one.
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    layout: [(3, Cause.UNRELATED), (4, Cause.HISTORY_SUMMARISED)]
    for layout in ("context_first", "model")
}


def main() -> None:
    summarising = SummarizationMiddleware(
        ChatOpenAI(model="summariser"), trigger=("messages", 7), keep=("messages", 3)
    )
    agent = create_agent(
        ChatOpenAI(model="guide"), [], middleware=[summarising], checkpointer=InMemorySaver()
    )
    for turn in range(4):
        agent.invoke(
            {"messages": [{"role": "user", "content": f"Question {turn} about the journey?"}]},
            {"configurable": {"thread_id": "1"}},
        )
