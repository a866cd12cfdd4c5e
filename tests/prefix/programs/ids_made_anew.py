"""A program that keeps names, arguments and results, and makes ids when it builds a request."""

import uuid
from typing import Any

import openai

from prefillshare_agents.testing import tool_call
from prefillshare_prefix import Cause

ANSWERS = [
    tool_call("search", q="trains"),
    tool_call("search", q="fares"),
    "The train at 9:40 is the cheapest.",
]
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    layout: [(2, Cause.RANDOM_ID)] for layout in ("context_first", "model")
}


def main() -> None:
    steps: list[tuple[Any, str]] = []

    def messages() -> list[Any]:
        built: list[Any] = [{"role": "user", "content": "Which train is cheapest?"}]
        for function, found in steps:
            call_id = f"call_{uuid.uuid4().hex}"
            call = {"id": call_id, "type": "function", "function": function}
            built.append({"role": "assistant", "content": None, "tool_calls": [call]})
            built.append({"role": "tool", "tool_call_id": call_id, "content": found})
        return built

    with openai.OpenAI() as client:
        while calls := (
            client.chat.completions.create(model="agent", messages=messages())
            .choices[0]
            .message.tool_calls
        ):
            function = calls[0].to_dict()["function"]
            steps.append((function, f"found {len(steps) + 3} pages"))
