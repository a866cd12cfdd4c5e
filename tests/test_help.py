"""``--help`` of every command: at once, and readable in an ordinary terminal."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from rich.text import Text

PROGRAMS = (
    "prefillshare_server.cli",
    "benchmarks.accuracy.sharing_ratio",
    "benchmarks.accuracy.tables",
    "benchmarks.accuracy.training_cost",
    "benchmarks.lora_modes.__main__",
    "benchmarks.sdk",
    "benchmarks.soak",
)
WIDTH = 78
"""Of the text, in a terminal of 80 columns."""


@pytest.mark.parametrize(
    "command", ["", "serve", "check", "models", "roles", "lint", "train", "eval", "bench"]
)
def test_help_loads_neither_torch_nor_vllm(command: str) -> None:
    program = (
        "import sys; from prefillshare_server.cli import app\n"
        f"try: app({[*command.split(), '--help']!r})\n"
        "except SystemExit as done: assert not done.code\n"
        "heavy = {'torch', 'vllm', 'transformers', 'datasets', 'lm_eval'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_fits_a_terminal_of_80_columns() -> None:
    """Behind the first paragraph a text keeps its lines: longer ones break in odd places."""
    commands = [
        command
        for program in PROGRAMS
        for command in _commands(typer.main.get_command(importlib.import_module(program).app))
    ]
    assert {"serve", "set", "lint", "train", "eval", "run", "report"} <= {c.name for c in commands}
    too_long = [
        (command.name, line)
        for command in commands
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n")[1:]
        for line in Text.from_markup(paragraph).plain.split("\n")
        if len(line) > WIDTH
    ]
    assert too_long == []


def _commands(command: Any) -> Iterator[Any]:
    """A command with all below it. Of click's types, of which typer has its own copies."""
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from _commands(each)
