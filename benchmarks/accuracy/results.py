"""Where results are kept, and how they are written: with the command that made them."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefillshare_server.errors import ConfigError
from prefillshare_server.models import store

if TYPE_CHECKING:
    from collections.abc import Mapping

    import typer

FOLDER = Path(__file__).parents[2] / "docs" / "results"


def work_folder(name: str) -> Path:
    """Where an experiment keeps its models between runs: beside the model store."""
    return store.home().parent / "experiments" / name


def command() -> str:
    """The command line of this process, as a user types it."""
    module = getattr(sys.modules["__main__"].__spec__, "name", None)
    start = (
        ["python", "-m", module.removesuffix(".__main__")] if module else ["python", sys.argv[0]]
    )
    return shlex.join([*start, *sys.argv[1:]])


def run(app: typer.Typer) -> None:
    """The program of `app`: what its user can mend ends with code 2 and a line each."""
    try:
        app()
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)


def write(figures: Mapping[str, Any], path: Path) -> None:
    """`figures` as JSON: whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote; nothing if it has not yet."""
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
