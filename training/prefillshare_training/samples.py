"""What training sees of a conversation: token ids only, rendered as the router renders them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer and the prompt it answers: one call of the served system."""

    prompt_ids: tuple[int, ...]
    """The whole prompt as the router would send it, x_1 … x_n; at least one token."""
    completion_ids: tuple[int, ...]
    """The answer y_1 … y_m, its end-of-turn token included; every one is a target."""

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.completion_ids:
            raise ValueError("a turn needs at least one prompt token and one completion token")


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation: its answers in order, each with its own full prompt.

    The prompts of one conversation share most of their tokens; `prefix_tree` computes what they
    share once.
    """

    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("a sample needs at least one turn")
