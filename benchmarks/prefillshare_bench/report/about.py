"""Where figures come from: machine, command, date, workload. Every results file carries it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from prefillshare_bench.report.points import Point

_OF_THE_RUN: Final = ("command", "started_at")
RATIOS: Final = (
    "above 1: PrefillShare is better (baseline/ours where less is better, else ours/baseline); "
    "1: equal; null: one is unknown, or the divisor is 0. Of the repeats that both systems have"
)
INTERVALS: Final = (
    "95%, by bootstrap: over repeats; where there is one repeat, over its sessions, which wait for "
    "each other: two runs can differ by more. Those are of means, p50 and p95 of latencies and TTFT"
)
LATENCIES: Final = (
    "p50_s, p95_s, p99_s and mean_s are of one call; session_*_s of a whole session, from its "
    "arrival, waiting included"
)


def about(points: Sequence[Point]) -> dict[str, Any]:
    """What one must know to judge the figures of `points`, and to measure them again.

    `machines` counts different ones: figures of several should not stand in one table.
    """
    facts = machines(points)
    return {
        "machine": facts[0] if facts else {},
        "machines": len(facts),
        "command": " && ".join(commands(points)),
        "date": min((str(p.about.get("started_at", "")) for p in points), default=""),
        "workloads": _distinct(
            {key: value for key, value in point.workload.items() if key != "type"}
            for point in points
        ),
        "setting": _distinct(point.data.get("setting") for point in points),
        "repeats": max((point.repeat for point in points), default=-1) + 1,
        "ratios": RATIOS,
        "intervals": INTERVALS,
        "latencies": LATENCIES,
        "throughput": "tokens of prompts and answers per second; generated_tok_s: of answers alone",
    }


def commands(points: Sequence[Point]) -> list[str]:
    """The different command lines that measured `points`."""
    return _distinct(point.about.get("command") for point in points)


def machines(points: Sequence[Point]) -> list[Mapping[str, Any]]:
    """The different machines (with what was installed on them) that `points` were measured on."""
    return _distinct(
        {key: value for key, value in point.about.items() if key not in _OF_THE_RUN}
        for point in points
    )


def _distinct(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value and value not in found:
            found.append(value)
    return found
