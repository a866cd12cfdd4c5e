"""A chat that writes the time into whichever question is the newest, and only into that one."""

from typing import Any

import openai

from prefillshare_prefix import Cause

ANSWERS = ["At 9:40 from platform 3.", "It takes three hours.", "Yes, in car 5."]
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    "context_first": [(1, Cause.TIMESTAMP), (2, Cause.TIMESTAMP)],
    "model": [(1, Cause.TIMESTAMP), (2, Cause.TIMESTAMP)],
}


def main() -> None:
    history: list[Any] = []
    clock = iter(["10:41", "10:43", "10:44"])
    with openai.OpenAI() as client:
        for question in ("When does it leave?", "How long is it?", "Is there food?"):
            newest: Any = {"role": "user", "content": f"[{next(clock)}] {question}"}
            answer = client.chat.completions.create(model="guide", messages=[*history, newest])
            history.append({"role": "user", "content": question})
            history.append({"role": "assistant", "content": answer.choices[0].message.content})
