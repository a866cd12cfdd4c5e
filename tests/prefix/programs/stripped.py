"""Notes of a scratchpad tool are tidied once they are no longer the newest."""

from typing import Any

import openai

from prefillshare_prefix import Cause

ANSWERS = ["Go on.", "Nearly.", "Done."]
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    layout: [(1, Cause.WHITESPACE), (2, Cause.WHITESPACE)] for layout in ("context_first", "model")
}


def main() -> None:
    chat: list[Any] = [{"role": "user", "content": "Find the bug."}]
    with openai.OpenAI() as client:
        for note in ("line 3:\tx is None\n\n", "line 9:\tx.y is read\n\n", "line 1:\tx = f()\n\n"):
            chat.append({"role": "user", "content": note})
            answer = client.chat.completions.create(model="debugger", messages=chat)
            chat[-1] = {"role": "user", "content": " ".join(note.split())}
            chat.append({"role": "assistant", "content": answer.choices[0].message.content})
