"""Errors that this package's clients have retried, told to the frameworks that would retry too."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import openai


def settle(error: openai.APIError) -> None:
    """Make `error` one that LangGraph's default policy does not retry: a RuntimeError too.

    Its class keeps its name, and stays a subclass of what it was.
    """
    if not isinstance(error, RuntimeError):
        kind: Any = type(error)
        error.__class__ = _settled_class(kind)


@cache
def _settled_class(kind: Any) -> Any:
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind, RuntimeError), names)


def in_node() -> bool:
    """Return whether a node of a LangGraph graph calls; without importing LangGraph."""
    if (module := sys.modules.get("langchain_core.runnables.config")) is None:
        return False
    config = module.var_child_runnable_config.get() or {}
    return any(key.startswith("__pregel_") for key in config.get("configurable") or ())
