"""Requests that are the same bytes in every process: tools in order, no random ids.

Frameworks build tool lists from sets, whose order changes with the process, and give messages they
make up themselves ("Transferring back to supervisor") a new random id in every run. Either would
be a new prompt, for a prefix that has not changed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_UUID = re.compile(r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}", re.IGNORECASE)
_SYSTEM_ROLES = ("system", "developer")


def tool_name(tool: Any) -> str:
    """Return the name of a tool in any form that LangChain or OpenAI's API has."""
    if not isinstance(tool, Mapping):
        return str(getattr(tool, "name", None) or getattr(tool, "__name__", ""))
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name", ""))


def settle_ids(messages: Sequence[dict[str, Any]], generated: set[str]) -> None:
    """Give tool calls that no model generated an id of their place and content, in place.

    Such an id is a bare UUID, as frameworks draw them; servers put something before theirs. Those
    in `generated` are left as they are, for the server finds the generated text by them.
    """
    start = next((i for i, m in enumerate(messages) if m["role"] not in _SYSTEM_ROLES), 0)
    settled: dict[str, str] = {}
    for position, message in enumerate(messages[start:]):
        for index, call in enumerate(message.get("tool_calls") or ()):
            old = call.get("id")
            if isinstance(old, str) and old not in generated and _UUID.fullmatch(old):
                settled[old] = call["id"] = _id_of(position, index, call["function"])
        answered = message.get("tool_call_id")
        if answered in settled:
            message["tool_call_id"] = settled[answered]


def _id_of(position: int, index: int, function: Mapping[str, Any]) -> str:
    content = json.dumps([position, index, function["name"], function["arguments"]])
    return f"call_{hashlib.sha256(content.encode()).hexdigest()[:24]}"
