"""LangChain's `trim_messages` before every call: the window slides by a turn each time."""

from langchain_core.messages import AnyMessage, HumanMessage, trim_messages
from langchain_openai import ChatOpenAI

from prefillshare_prefix import Cause

ANSWERS = [f"Answer {i}, which has a few words." for i in range(5)]
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    layout: [(call, Cause.HISTORY_TRIMMED) for call in (2, 3, 4)]
    for layout in ("context_first", "model")
}


def main() -> None:
    model = ChatOpenAI(model="guide")
    history: list[AnyMessage] = []
    for turn in range(5):
        history.append(HumanMessage(f"Question {turn} about the journey?"))
        window = trim_messages(
            history, max_tokens=3, token_counter=len, strategy="last", start_on="human"
        )
        history.append(model.invoke(window))
