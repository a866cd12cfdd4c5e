"""What commands of ``prefillshare bench`` have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from prefillshare_server.errors import ConfigError, Problem

Seed = Annotated[int, typer.Option("--seed", help="All tokens and arrivals are drawn with it.")]


def one_of(field: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises ConfigError for a name that is not known."""
    for name in names:
        if name not in known:
            raise ConfigError(Problem(field, f"{name!r} is none", f"use {', '.join(known)}"))
