"""Whose KV of the prompt a decoder attends to (paper, Fig. 2)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from prefillshare_server.errors import ConfigError, Problem

By = Literal["prefix", "layer"]

_RATIO = re.compile(r"(?:ratio[:= ]?)?(\d*\.?\d+)(?::(prefix|layer))?")


@dataclass(frozen=True)
class Ratio:
    """A part of the prompt's KV is the base's; the last prompt token never is.

    By prefix, the first ⌊r·(n−1)⌋ positions are the base's and the decoder prefills the others on
    top of them. By layer, both models compute all positions by themselves, and the first r·L layers
    (rounded half up) are taken from the base.
    """

    r: float
    by: By = "prefix"

    def __post_init__(self) -> None:
        if not 0 <= self.r <= 1:
            raise ValueError(f"a sharing ratio is between 0 and 1, not {self.r}")

    def __str__(self) -> str:
        return f"{self.r:g}" if self.by == "prefix" else f"{self.r:g}:{self.by}"


Mode = Literal["own", "shared"] | Ratio
"""``own``: the decoder's, as in ordinary generation; ``shared``: the base's (N−1 rule)."""


def parse(text: str) -> Mode:
    """``own``, ``shared``, ``0.25`` (by prefix) or ``0.25:layer``. Raises ConfigError."""
    if text == "own":
        return "own"
    if text == "shared":
        return "shared"
    match = _RATIO.fullmatch(text)
    if match is None or float(match[1]) > 1:
        raise ConfigError(
            Problem(
                f"mode {text!r}",
                "not a way of sharing the prompt's KV",
                "write own, shared, or a ratio from 0 to 1 such as 0.25 or 0.25:layer",
            )
        )
    return Ratio(float(match[1]), "layer" if match[2] == "layer" else "prefix")


def needs_base(mode: Mode) -> bool:
    """Whether any of the prompt's KV is the base's."""
    return mode != "own"


def base_positions(mode: Mode, prompt_tokens: int) -> int:
    """How many leading prompt positions have the base's KV, in the layers that share at all."""
    if isinstance(mode, Ratio) and mode.by == "prefix":
        # Products such as 0.29 * 100 end just below the whole number that is meant.
        return math.floor(mode.r * (prompt_tokens - 1) + 1e-9)
    return 0 if mode == "own" else prompt_tokens - 1


def base_layers(mode: Mode, layers: int) -> int:
    """How many leading layers take the base's KV."""
    if isinstance(mode, Ratio) and mode.by == "layer":
        return math.floor(mode.r * layers + 0.5)
    return 0 if mode == "own" else layers
