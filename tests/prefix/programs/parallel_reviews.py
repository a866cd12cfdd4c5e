"""`Send`: three reviews of one draft at the same time, in two rounds each, and one conclusion."""

import operator
from typing import Annotated, Any, TypedDict

import openai
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from prefillshare_agents.testing import Request
from prefillshare_prefix import Cause

DRAFT: Any = {"role": "user", "content": "The draft: trains are the best way to see Italy. " * 4}
VIEWS = ("style", "facts", "tone")
BREAKS: dict[str, list[tuple[int, Cause]]] = {"context_first": [], "model": []}


def ANSWERS(request: Request) -> str:
    return f"A word on the {request.body['messages'][-1]['content'].split()[-1]}"


class View(TypedDict):
    view: str


class State(TypedDict):
    reviews: Annotated[list[str], operator.add]


def main() -> None:
    with openai.OpenAI() as client:

        def ask(messages: list[Any]) -> str:
            answer = client.chat.completions.create(model="reviewer", messages=messages)
            return answer.choices[0].message.content or ""

        def review(state: View) -> State:
            messages: list[Any] = [
                DRAFT,
                {"role": "user", "content": f"Look at its {state['view']}"},
            ]
            messages.append({"role": "assistant", "content": ask(messages)})
            messages.append({"role": "user", "content": "Now in one word"})
            return {"reviews": [ask(messages)]}

        def conclude(state: State) -> State:
            reviews = "\n".join(sorted(state["reviews"]))
            ask([DRAFT, {"role": "user", "content": f"Conclude from:\n{reviews}"}])
            return {"reviews": []}

        graph = StateGraph(State)
        graph.add_node("review", review, input_schema=View)
        graph.add_node("conclude", conclude)
        graph.add_conditional_edges(
            START, lambda _: [Send("review", {"view": view}) for view in VIEWS]
        )
        graph.add_edge("review", "conclude")
        graph.add_edge("conclude", END)
        graph.compile().invoke({"reviews": []})
