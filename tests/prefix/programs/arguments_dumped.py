"""A tool loop whose memory keeps tool calls as objects, and dumps them for every later call."""

import json
from typing import Any

import openai

from prefillshare_prefix import Cause

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":2,"b":40}'}}
ANSWERS: list[Any] = [{"tool_calls": [CALL]}, "It is 42.", "Yes."]
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    layout: [(2, Cause.ARGUMENTS_REWRITTEN)] for layout in ("context_first", "model")
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def main() -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 2 and 40?"}]
    with openai.OpenAI() as client:

        def ask() -> Any:
            answer = client.chat.completions.create(model="solver", messages=messages, tools=[TOOL])
            messages.append(answer.choices[0].message.to_dict())
            return messages[-1]

        call = ask()["tool_calls"][0]
        numbers = json.loads(call["function"]["arguments"])
        result = str(sum(numbers.values()))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        ask()
        # Back from the memory:
        call["function"]["arguments"] = json.dumps(numbers)
        messages.append({"role": "user", "content": "Are you sure?"})
        ask()
