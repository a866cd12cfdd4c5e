"""How sure a latency of a single run is: 95% intervals over its sessions.

Sessions that run at once wait for each other, so that two runs can differ by more than these say.
Where there are repeats, intervals are over those (see compare.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prefillshare_bench.report.points import Point

DRAWS: Final = 1_000
Values = Mapping[str, Sequence[float]]
"""What a session contributes, by its name."""


def interval(measure: str, point: Point) -> list[float] | None:
    """95% interval of a latency: sessions are drawn with replacement (a bootstrap, seeded).

    None for a measure that is no latency of calls or sessions, and with fewer than two sessions.
    """
    values = _by_session(measure, point)
    return None if len(values) < 2 else _edges(_drawn(measure, values), 6)


def ratio_interval(measure: str, ours: Point, theirs: Point) -> list[float] | None:
    """The same of theirs over ours. Both ran the same sessions, so both are drawn together."""
    mine, other = _by_session(measure, ours), _by_session(measure, theirs)
    both = sorted(mine.keys() & other.keys())
    if len(both) < 2:
        return None
    under = _drawn(measure, {name: mine[name] for name in both})
    over = _drawn(measure, {name: other[name] for name in both})
    return _edges(over / under, 4) if under.all() else None


def _drawn(measure: str, values: Values) -> NDArray[np.float64]:
    """The measure of each draw: the same sessions for the same names."""
    statistic = _LATENCIES[measure][1]
    rows = [np.asarray(values[name], float) for name in sorted(values)]
    picked = np.random.default_rng(0).integers(0, len(rows), (DRAWS, len(rows)))
    if len({len(row) for row in rows}) == 1:
        found = statistic(np.stack(rows)[picked].reshape(DRAWS, -1), axis=1)
    else:
        found = [statistic(np.concatenate([rows[index] for index in draw])) for draw in picked]
    return np.asarray(found, float)


def _by_session(measure: str, point: Point) -> Values:
    """The latencies that a measure is made of, of the calls that succeeded."""
    if measure not in _LATENCIES:
        return {}
    kind = _LATENCIES[measure][0]
    calls: dict[str, list[Mapping[str, Any]]] = {}
    for call in sorted(point.calls, key=lambda call: int(call["index"])):
        calls.setdefault(call["session"], []).append(call)
    found = {name: kind(made) for name, made in calls.items()}
    return {name: values for name, values in found.items() if values}


def _whole(calls: Sequence[Mapping[str, Any]]) -> list[float]:
    if any(call["error"] for call in calls):
        return []
    return [calls[-1]["last_s"] - calls[0]["arrived_s"]]


def _until(moment: str, calls: Sequence[Mapping[str, Any]]) -> list[float]:
    return [
        call[moment] - call["arrived_s"]
        for call in calls
        if not call["error"] and call[moment] is not None
    ]


def _milliseconds(calls: Sequence[Mapping[str, Any]]) -> list[float]:
    return [1000 * value for value in _until("first_s", calls)]


_CALL, _TTFT = partial(_until, "last_s"), _milliseconds
_P50, _P95 = partial(np.percentile, q=50), partial(np.percentile, q=95)
_LATENCIES: Final[
    Mapping[str, tuple[Callable[[Sequence[Mapping[str, Any]]], list[float]], Callable[..., Any]]]
] = {
    "p50_s": (_CALL, _P50),
    "p95_s": (_CALL, _P95),
    "mean_s": (_CALL, np.mean),
    "session_p50_s": (_whole, _P50),
    "session_p95_s": (_whole, _P95),
    "session_mean_s": (_whole, np.mean),
    "ttft_ms": (_TTFT, np.mean),
    "ttft_p50_ms": (_TTFT, _P50),
    "ttft_p95_ms": (_TTFT, _P95),
}


def _edges(found: NDArray[np.float64], digits: int) -> list[float]:
    return [round(float(edge), digits) for edge in np.percentile(found, (2.5, 97.5))]
