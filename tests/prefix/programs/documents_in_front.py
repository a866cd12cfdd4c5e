"""Retrieval that puts what it finds before the conversation, from the second question on."""

from typing import Any

import openai

from prefillshare_prefix import Cause

ANSWERS = ["Ask me about trains.", "At 9:40.", "29.50."]
FOUND = [None, "Timetable: Rome 9:40, arrives in Milan 13:15.", "Fares: standard 29.50, first 58."]
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    layout: [(1, Cause.MESSAGE_INSERTED), (2, Cause.MESSAGE_EDITED)]
    for layout in ("context_first", "model")
}


def main() -> None:
    chat: list[Any] = []
    with openai.OpenAI() as client:
        for question, found in zip(("Hello!", "When?", "How much?"), FOUND, strict=True):
            chat.append({"role": "user", "content": question})
            documents: list[Any] = [{"role": "user", "content": found}] if found else []
            answer = client.chat.completions.create(model="guide", messages=[*documents, *chat])
            chat.append({"role": "assistant", "content": answer.choices[0].message.content})
