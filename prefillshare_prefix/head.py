"""What differs at the head of two prompts, where the system message and the tools stand first."""

from __future__ import annotations

import json
from typing import Any

from prefillshare_prefix.causes import Break, Cause
from prefillshare_prefix.messages import Request
from prefillshare_prefix.texts import excerpts, likeness, one_line, quoted, same_but_for

_ALIKE = 0.5


def head_break(before: Request, after: Request) -> Break | None:
    """What differs in the system message and the tools, where these stand first."""
    if before.system != after.system:
        return _system_break(before, after)
    if before.tools == after.tools:
        return None
    one, other = "\n".join(before.tools), "\n".join(after.tools)
    same = sorted(map(_unordered, before.tools)) == sorted(map(_unordered, after.tools))
    cause = Cause.TOOL_ORDER if same else Cause.TOOLS_CHANGED
    what = "the same tools in another order" if same else "other tools"
    detail = f"tools: {what}, {len(before.tools)} before and {len(after.tools)} now"
    return Break(cause, None, detail, *excerpts(one, other))


def _system_break(before: Request, after: Request) -> Break:
    one, other = (
        "\n".join(message.text for message in request.system) for request in (before, after)
    )
    cause = same_but_for(one, other) if before.system and after.system else None
    if cause is None:
        other_role = before.model != after.model or likeness(one, other) < _ALIKE
        both = bool(before.system and after.system) or before.model != after.model
        cause = Cause.ROLE_PROMPT_FIRST if other_role and both else Cause.SYSTEM_CHANGED
    expected, found = excerpts(one, other)
    tools = "" if before.tools == after.tools else "; the tools differ as well"
    changed = f"{quoted(one_line(expected))} became {quoted(one_line(found))}"
    detail = f"messages[0].content: {changed}{tools}"
    return Break(cause, 0 if after.system else None, detail, expected, found)


def _unordered(tool: str) -> str:
    """A tool's JSON without the order of its keys and of lists of names."""
    try:
        value = json.loads(tool, object_hook=_sorted_lists)
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return tool


def _sorted_lists(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: sorted(value)
        if isinstance(value, list) and all(isinstance(item, str) for item in value)
        else value
        for key, value in fields.items()
    }
