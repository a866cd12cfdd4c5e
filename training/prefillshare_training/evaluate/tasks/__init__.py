"""The benchmarks that `prefillshare eval` knows."""

from __future__ import annotations

from typing import get_args

from prefillshare_server.errors import ConfigError, Problem, suggestion
from prefillshare_training.evaluate.tasks.bfcl import Bfcl
from prefillshare_training.evaluate.tasks.exact import Exact, Match
from prefillshare_training.evaluate.tasks.gsm8k import Gsm8k
from prefillshare_training.evaluate.tasks.humaneval import HumanEval
from prefillshare_training.evaluate.tasks.task import Item, Task

__all__ = ["TASKS", "Item", "Task", "make"]

TASKS = ("gsm8k", "humaneval", "bfcl-simple-python", "bfcl-multiple", "exact")


def make(name: str, *, data: str | None = None, match: str | None = None) -> Task:
    """The task of this name. `data` is a file or hub id where the task reads one.

    Raises ConfigError for a name or an option that does not fit.
    """
    if name not in TASKS:
        raise ConfigError(
            Problem(f"task {name!r}", "there is no such task", suggestion(name, TASKS))
        )
    if data is not None and name not in ("gsm8k", "exact"):
        raise ConfigError(Problem("--data", f"{name} brings its own data", "leave it out"))
    if match is not None and name != "exact":
        raise ConfigError(Problem("--match", f"{name} has its own rule", "leave it out"))
    if name == "gsm8k":
        return Gsm8k(data) if data else Gsm8k()
    if name == "humaneval":
        return HumanEval()
    if name == "bfcl-simple-python":
        return Bfcl("simple_python")
    if name == "bfcl-multiple":
        return Bfcl("multiple")
    if data is None:
        raise ConfigError(
            Problem("--data", "is missing", "name a JSONL file of prompts and answers")
        )
    return Exact(data, _match(match or "exact"))


def _match(name: str) -> Match:
    for known in get_args(Match):
        if name == known:
            return known
    raise ConfigError(
        Problem(f"--match {name}", "there is no such rule", suggestion(name, get_args(Match)))
    )
