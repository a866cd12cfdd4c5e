"""Random conversations in OpenAI's format, for property tests."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

Message = dict[str, Any]

# Inner whitespace is kept by every template; what templates do to whitespace at the ends of
# a message is their own business.
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).map(
    lambda text: text.strip() or "x"
)
names = st.sampled_from(["add", "look_up"])
arguments = st.dictionaries(st.sampled_from(["a", "b"]), st.integers() | texts, max_size=2)


def tool(name: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def tool_call(name: str, args: dict[str, Any], call_id: str = "abcdefghi") -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(args, ensure_ascii=False)}
    return {"id": call_id, "type": "function", "function": function}


@st.composite
def heads(draw: st.DrawFn) -> tuple[list[Message], list[dict[str, Any]]]:
    """A role's own messages (none, or a system message) and its tools."""
    role = draw(st.sampled_from(["system", "developer"]))
    instructions = draw(st.none() | texts)
    head = [] if instructions is None else [{"role": role, "content": instructions}]
    return head, draw(st.lists(st.builds(tool, names, texts), max_size=2))


def _said(role: str) -> st.SearchStrategy[Message]:
    as_parts = st.lists(
        st.builds(lambda text: {"type": "text", "text": text}, texts), min_size=1, max_size=2
    )
    return st.builds(lambda content: {"role": role, "content": content}, texts | as_parts)


@st.composite
def free_conversations(draw: st.DrawFn) -> list[Message]:
    """Any order of speakers, tool calls with their results, system messages in between."""
    conversation: list[Message] = [draw(_said("user"))]
    for kind in draw(
        st.lists(st.sampled_from(["user", "assistant", "system", "call"]), max_size=5)
    ):
        if kind == "call":
            call = tool_call(draw(names), draw(arguments))
            content = draw(st.none() | texts)
            conversation.append({"role": "assistant", "content": content, "tool_calls": [call]})
            conversation.append(
                {"role": "tool", "tool_call_id": call["id"], "content": draw(texts)}
            )
        else:
            conversation.append(draw(_said(kind)))
    return conversation


@st.composite
def alternating_conversations(draw: st.DrawFn) -> list[Message]:
    """User and assistant in turn, the only order that strict templates accept."""
    length = draw(st.integers(min_value=1, max_value=6))
    return [draw(_said("user" if index % 2 == 0 else "assistant")) for index in range(length)]
