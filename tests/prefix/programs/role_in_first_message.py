"""Agents whose role is their first user message, for models that know no system message."""

from typing import Any

import openai

from prefillshare_prefix import Cause

ROLES = {
    "coder": "You are a Python programmer. Reply with code only.",
    "tester": "You are a careful tester. Name one input for which the code fails.",
}
ANSWERS = ["def mean(xs): return sum(xs) / len(xs)", "An empty list.", "Then: ... or 0", "None."]
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    layout: [(1, Cause.ROLE_PROMPT_FIRST)] for layout in ("context_first", "model")
}


def main() -> None:
    chat: list[Any] = [{"role": "user", "content": "Write a function for the mean of a list."}]
    with openai.OpenAI() as client:
        for role in ("coder", "tester", "coder", "tester"):
            first: Any = {"role": "user", "content": ROLES[role]}
            answer = client.chat.completions.create(model="one-model", messages=[first, *chat])
            said = answer.choices[0].message.content
            chat.append({"role": "assistant", "content": said, "name": role})
