"""How many times better PrefillShare is, and how sure that is over repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from prefillshare_bench import measures
from prefillshare_bench.report.labels import MEASURES

_ALIASES: Final = {
    "mean_ttft_s": "ttft_ms",
    "local_prefill_tokens": "prefilled_tokens",
    "hit_percent": "hit_rate",
    "kv_bytes": "kv_bytes_peak",
    "memory_bytes": "kv_bytes_peak",
    "kv_prefill_bytes": "kv_bytes_peak",
    "kv_kept_bytes": "kv_bytes_peak",
    "kv_bytes_per_session": "kv_bytes_peak",
}
"""Columns of tables, by the measure that says which direction is better."""


def ratio(measure: str, ours: float | None, theirs: float | None) -> float | None:
    """Above 1: PrefillShare is better. None where it cannot be said (see `measures.ratios`)."""
    known = _ALIASES.get(measure, measure)
    return measures.ratios({known: ours}, {known: theirs})[known]


def ratios(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float | None]:
    """`ratio` of every measure that both name."""
    return {
        name: ratio(name, ours[name], theirs[name])
        for name in ours
        if name in MEASURES and name in theirs
    }


def ratio_interval(
    measure: str, ours: Mapping[int, float], theirs: Mapping[int, float]
) -> list[float] | None:
    """95% interval of the ratio of the means, over repeats: {number of the repeat: value}.

    A repeat is the same workload for both, so both are drawn together (a bootstrap, seeded).
    None with fewer than two repeats in common, or where there is a zero to divide by.
    """
    both = sorted(ours.keys() & theirs.keys())
    if len(both) < 2:
        return None
    mine = np.array([ours[repeat] for repeat in both])
    other = np.array([theirs[repeat] for repeat in both])
    more_is_better = _ALIASES.get(measure, measure) in measures.HIGHER_IS_BETTER
    over, under = (mine, other) if more_is_better else (other, mine)
    if not under.all():
        return None
    drawn = np.random.default_rng(0).integers(0, len(both), (measures.DRAWS, len(both)))
    quotients = over[drawn].sum(axis=1) / under[drawn].sum(axis=1)
    return [round(float(edge), 4) for edge in np.percentile(quotients, (2.5, 97.5))]


def interval(values: Sequence[float]) -> list[float] | None:
    """95% interval of the mean over repeats; None with fewer than two."""
    if len(values) < 2:
        return None
    return [round(edge, 6) for edge in measures.interval(values)]
