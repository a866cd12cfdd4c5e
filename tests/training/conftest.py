"""The tiny family for training: a base, and samples of random tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from prefillshare_training.samples import Sample, Turn

VOCABULARY = 256

Draw = Callable[[int], tuple[int, ...]]


@pytest.fixture(scope="session")
def base_dir(tiny_home: Path) -> Path:
    """The tiny base, fp32."""
    return tiny_home / "models" / "tiny-base"


@pytest.fixture
def draw() -> Draw:
    """Draws random token ids, the same in every run."""
    source = random.Random(7)
    return lambda count: tuple(source.randrange(VOCABULARY) for _ in range(count))


@pytest.fixture
def samples(draw: Draw) -> list[Sample]:
    """Samples of many shapes: one turn and several, long and short, prompts that branch."""
    context = draw(12)
    longer = context + draw(9)
    return [
        Sample((Turn(draw(20), draw(7)),)),
        # What the context-first layout gives: each prompt leaves the context for its own tail.
        Sample((Turn(context + draw(4), draw(5)), Turn(longer + draw(6), draw(3)))),
        # What a template without a tail gives: each prompt goes on from the one before.
        Sample((Turn(context, draw(2)), Turn(longer, draw(8)), Turn(longer + draw(3), draw(1)))),
        # No base token at all: x_1 is the decoder's own.
        Sample((Turn(draw(1), draw(4)),)),
    ]
