"""Three roles in a loop over one growing list; each role's instructions lead its own calls."""

from typing import Any

import openai

from prefillshare_prefix import Cause

ROLES = {
    "planner": "You plan journeys in short numbered steps.",
    "critic": "As the critic, point out what is missing. One sentence.",
    "writer": "Write the final text for the traveller.",
}
ANSWERS = [f"answer number {i}, in some more words" for i in range(6)]
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    "context_first": [],
    "model": [(1, Cause.ROLE_PROMPT_FIRST), (2, Cause.ROLE_PROMPT_FIRST)],
}


def main() -> None:
    context: list[Any] = [{"role": "user", "content": "Two days in Rome with children, by train."}]
    with openai.OpenAI() as client:
        for _ in range(2):
            for role, instructions in ROLES.items():
                head: Any = {"role": "system", "content": instructions}
                answer = client.chat.completions.create(model=role, messages=[head, *context])
                context.append(answer.choices[0].message.to_dict())
