"""From scores of items to an accuracy, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_Z95 = 1.959963984540054


class Accuracy(NamedTuple):
    """In percent."""

    percent: float
    low: float
    """Lower and upper end of the 95 % Wilson score interval."""
    high: float


def accuracy(scores: Sequence[float]) -> Accuracy:
    """Of scores from 0 to 1. Raises ValueError when there are none."""
    if not scores:
        raise ValueError("no items were scored")
    n, share = len(scores), math.fsum(scores) / len(scores)
    scale = 1 + _Z95**2 / n
    centre = (share + _Z95**2 / (2 * n)) / scale
    half = _Z95 / scale * math.sqrt(share * (1 - share) / n + _Z95**2 / (4 * n * n))
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return Accuracy(100 * share, 100 * low, 100 * high)
