"""Options of OpenAI's Responses API. Sessions share prefill over chat completions only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OTHERS = (
    *("context_management", "include", "previous_response_id", "text", "truncation"),
    *("use_previous_response_id", "use_responses_api"),
)


def of_responses_api(options: Mapping[str, Any]) -> str | None:
    """Return what in `options` is for the Responses API, and what to give instead; None if nothing.

    `options` are a model's fields or those of a request.
    """
    if options.get("output_version") == "responses/v1":
        return "output_version is 'responses/v1'; give 'v1' or leave it out"
    if reasoning := options.get("reasoning"):
        effort = reasoning.get("effort") if isinstance(reasoning, Mapping) else None
        return f"reasoning is {reasoning!r}; give reasoning_effort={effort or 'medium'!r} instead"
    # The flag last, for ChatOpenAI sets it itself where one of the others is given.
    for name in _OTHERS:
        if options.get(name):
            return f"{name} is {options[name]!r}; leave it out"
    return None


def refuse_responses_api(options: Mapping[str, Any]) -> None:
    """Raise ValueError if anything in `options` is for the Responses API."""
    if found := of_responses_api(options):
        raise ValueError(f"{found} (it is of the Responses API; sessions need chat completions)")
