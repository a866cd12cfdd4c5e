"""A debate: each agent sees its own turns as the assistant's, and the other's as the user's."""

import openai

from prefillshare_prefix import Cause

QUESTION = {"role": "user", "content": "Should the centre of Rome be closed to cars?"}
TURNS = [
    "For: the streets are narrow, and the air is bad all year round.",
    "Against: shops live on deliveries, and buses are full already.",
    "For: deliveries can come at night, as they do in other towns.",
    "Against: at night people sleep, and somebody has to pay for it.",
]
ANSWERS = {"for": TURNS[::2], "against": TURNS[1::2]}
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    # The first two calls have nothing that was sent before in another form.
    layout: [(2, Cause.ROLE_CHANGED), (3, Cause.ROLE_CHANGED)]
    for layout in ("context_first", "model")
}


def main() -> None:
    said: list[tuple[str, str]] = []
    with openai.OpenAI() as client:
        for me in ("for", "against", "for", "against"):
            turns = [
                {"role": "assistant" if speaker == me else "user", "content": text}
                for speaker, text in said
            ]
            answer = client.chat.completions.create(
                model=me,
                messages=[QUESTION, *turns],  # type: ignore[list-item]
            )
            said.append((me, answer.choices[0].message.content or ""))
