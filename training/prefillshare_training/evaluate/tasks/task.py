"""What a benchmark is to the evaluation: items with prompts, and a score for an answer's text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from prefillshare_training.data.rendering import Renderer


@dataclass(frozen=True, slots=True)
class Item:
    """One question."""

    key: str
    """Its name in the benchmark."""
    prompt_ids: tuple[int, ...]
    expected: Any
    """What the task scores by; JSON."""


class Task(Protocol):
    """A benchmark. Scores have the metric that counts first."""

    @property
    def name(self) -> str:
        """As in `TASKS`."""

    @property
    def max_tokens(self) -> int:
        """Room for an answer."""

    def items(self, renderer: Renderer) -> list[Item]:
        """All its items. Raises ConfigError, with the remedy, when its data is missing or bad."""

    def score(self, item: Item, text: str) -> Mapping[str, float]:
        """From 0, wrong, to 1, right, by metric; never raises for what a model wrote."""
