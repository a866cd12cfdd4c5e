"""Retrieval that wraps the newest question in documents and keeps only the question."""

from typing import Any

import openai

from prefillshare_prefix import Cause

ANSWERS = ["At 9:40.", "29.50.", "Yes."]
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    layout: [(1, Cause.MESSAGE_EDITED), (2, Cause.MESSAGE_EDITED)]
    for layout in ("context_first", "model")
}


def main() -> None:
    chat: list[Any] = []
    with openai.OpenAI() as client:
        for question in ("When does the train leave?", "How much is it?", "Can I take a dog?"):
            wrapped = f"Documents:\n- all about: {question[::-1]}\n\nQuestion: {question}"
            newest: Any = {"role": "user", "content": wrapped}
            answer = client.chat.completions.create(model="guide", messages=[*chat, newest])
            chat.append({"role": "user", "content": question})
            chat.append({"role": "assistant", "content": answer.choices[0].message.content})
