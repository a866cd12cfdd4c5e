"""The critic reads the solver's thoughts; what is kept for later calls has none."""

import re
from typing import Any

import openai

from prefillshare_prefix import Cause

ANSWERS = {
    "solver": ["<think>\n12 times 12 is 144.\n</think>\n\n144.", "Yes, 144."],
    "critic": ["That is right.", "Still right."],
}
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    "context_first": [(2, Cause.THINK_STRIPPED)],
    "model": [(1, Cause.ROLE_PROMPT_FIRST), (3, Cause.THINK_STRIPPED)],
}


def main() -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 12 times 12?"}]
    with openai.OpenAI() as client:
        for _ in range(2):
            for role, prompt in (("solver", "Solve it."), ("critic", "Check the reasoning.")):
                head: Any = {"role": "system", "content": prompt}
                answer = client.chat.completions.create(model=role, messages=[head, *messages])
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages[-2]["content"] = re.sub(
                r"(?s)<think>.*?</think>\s*", "", messages[-2]["content"]
            )
            messages.append({"role": "user", "content": "And are you sure?"})
