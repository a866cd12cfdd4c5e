"""Tools from several MCP servers that are listed anew before every call, whoever answers first."""

from typing import Any

import openai

from prefillshare_prefix import Cause

ANSWERS = ["One.", "Two.", "Three."]
LISTED = [["files", "web", "mail"], ["web", "files", "mail"], ["mail", "web", "files"]]
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    "context_first": [],
    "model": [(1, Cause.TOOL_ORDER), (2, Cause.TOOL_ORDER)],
}


def described(name: str) -> Any:
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Search {name}.", "parameters": parameters},
    }


def main() -> None:
    chat: list[Any] = [{"role": "system", "content": "Use the tools when they help."}]
    with openai.OpenAI() as client:
        for turn, names in enumerate(LISTED):
            chat.append({"role": "user", "content": f"Question {turn}: what is new?"})
            tools = [described(name) for name in names]
            answer = client.chat.completions.create(model="agent", messages=chat, tools=tools)
            chat.append({"role": "assistant", "content": answer.choices[0].message.content})
