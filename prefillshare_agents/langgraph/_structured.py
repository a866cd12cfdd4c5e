"""Structured answers by guided decoding, without openai's `parse` helpers.

`ChatOpenAI` sends every `response_format` through them. They raise where `max_tokens` cut the
answer, so that the answer is lost, stream in events instead of text, and warn of their own types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_function
from pydantic import BaseModel

PARSED = "parsed"
"""Key in `additional_kwargs` where `with_structured_output` looks for the answer's object."""


def as_extra_body(payload: dict[str, Any]) -> None:
    """Move `response_format` out of sight of ChatOpenAI, in place: it is sent all the same."""
    if (wanted := payload.pop("response_format", None)) is not None:
        extra = payload.get("extra_body") or {}
        payload["extra_body"] = {"response_format": _on_the_wire(wanted), **extra}


def is_typed(response_format: Any) -> bool:
    """Return whether the answer is to become an object of a pydantic model."""
    return isinstance(response_format, type) and issubclass(response_format, BaseModel)


def parsed(text: str) -> Mapping[str, Any] | None:
    """Return the JSON object that `text` is; None if it is none, or not whole.

    A dictionary rather than the model's object: it has to go through checkpointers.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _on_the_wire(response_format: Any) -> Any:
    if not is_typed(response_format):
        return response_format
    function = convert_to_openai_function(response_format, strict=True)
    schema = {"name": function["name"], "schema": function["parameters"], "strict": True}
    return {"type": "json_schema", "json_schema": schema}
