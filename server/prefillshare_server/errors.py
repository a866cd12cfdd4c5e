"""Errors a user can act on before anything serves."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, where it is, and what to do about it; prints as one line."""

    where: str
    """File and field path, for example ``cluster.yaml: router.port``."""
    what: str
    """What is wrong, with the offending value."""
    remedy: str
    """What to write or run instead."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"


class ConfigError(Exception):
    """Start-up cannot go on because of what was configured; the CLI exits with code 2.

    Carries every problem found at once. ``str()`` gives one line per problem.
    """

    def __init__(self, *problems: Problem) -> None:
        self.problems: tuple[Problem, ...] = problems
        super().__init__("\n".join(str(problem) for problem in problems))


def suggestion(word: str, known: Iterable[str]) -> str:
    """``did you mean 'port'?`` when a known word is close, else the list of known words."""
    options = sorted(known)
    close = get_close_matches(word, options, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(options)}"
