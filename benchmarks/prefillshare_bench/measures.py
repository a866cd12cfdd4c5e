"""Figures of a run: what the paper's tables and plots are made of.

`throughput_tok_s` counts prompt and generated tokens, as the paper's figures must do. In its
Table 6, 0.68M tokens are computed at 94.4% hits, so the 64 sessions have about 12M prompt tokens
(the other two rows give the same). At 63.13k tokens a second these take 190 s: the 128 s in which
sessions arrive at 0.5 a second, and a minute for the last ones. Were only generated tokens meant,
each of the 1,024 calls would have to write some 10,000. `generated_tok_s` has the generated ones
alone.

The p95 of the same table, 87 s beside a mean TTFT of 1.6 s, fits a session of 16 calls and no call.
Here `session_p95_s` is a session's and `p95_s` a call's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from prefillshare_bench.records import REFUSED, Replay
from prefillshare_bench.traces import Workload

Figures = dict[str, Any]
Count = TypeVar("Count", int, float)

LOWER_IS_BETTER = (
    *("p50_s", "p95_s", "p99_s", "mean_s"),
    *("session_p50_s", "session_p95_s", "session_p99_s", "session_mean_s"),
    *("ttft_ms", "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms"),
    *("tpot_ms", "itl_p50_ms", "itl_p95_ms", "itl_p99_ms"),
    *("prefilled_tokens", "load_ratio", "recompute_amplification"),
    *("handoff_bytes", "handoff_ms", "kv_bytes_peak", "preemptions", "rejected_sessions"),
)
HIGHER_IS_BETTER = ("throughput_tok_s", "generated_tok_s", "hit_rate")
DRAWS = 10_000
_DIGITS = 6
_PERCENTILES = (50, 95, 99)


class WorkerCounts(Protocol):
    """What is read of a worker's state."""

    @property
    def id(self) -> str: ...
    @property
    def phase(self) -> str:
        """A worker of phase `decode` computes no prompts."""

    @property
    def query_tokens(self) -> int: ...
    @property
    def hit_tokens(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def handoffs(self) -> int: ...
    @property
    def handoff_seconds(self) -> float: ...


def figures(
    replay: Replay,
    before: Sequence[WorkerCounts],
    after: Sequence[WorkerCounts],
    *,
    workload: Workload,
    block_size: int = 1,
    kv_bytes_peak: int | None = None,
) -> Figures:
    """All figures of one run. None is what cannot be known, as a latency when no call succeeded.

    Latencies and rates are of the calls that succeeded, session latencies of the sessions of which
    all did. `before` and `after` are the workers' states around the run: only what changed counts.
    With `block_size` the tokens that a cache of whole blocks cannot keep are no recomputation.
    """
    done = [call for call in replay.calls if call.ok]
    by_session = replay.sessions()
    expected = {session.id: len(session.calls) for session in workload.sessions}
    whole = [
        calls[-1].last_s - calls[0].arrived_s
        for session, calls in by_session.items()
        if len(calls) == expected[session] and all(call.ok for call in calls)
    ]
    ttft = [1000 * call.ttft_s for call in done if call.ttft_s is not None]
    rejected = sum(calls[0].status == REFUSED for calls in by_session.values())
    per_worker = prefilled_per_worker(before, after)
    prefilled = sum(per_worker.values()) if per_worker else None
    return {
        **_spread("", "_s", [call.latency_s for call in done]),
        **_spread("session_", "_s", whole),
        "ttft_ms": _mean(ttft),
        **_percentiles("ttft_", "_ms", ttft),
        "tpot_ms": _mean([call.tpot_ms for call in done if call.tpot_ms is not None]),
        **_percentiles("itl_", "_ms", [gap for call in done for gap in call.itl_ms]),
        "throughput_tok_s": _rate(
            sum((call.prompt_tokens or 0) + call.generated for call in done), replay.wall_s
        ),
        "generated_tok_s": _rate(sum(call.generated for call in done), replay.wall_s),
        "hit_rate": _hit_rate(before, after),
        "prefilled_tokens": prefilled,
        "prefilled_per_worker": per_worker,
        "load_ratio": load_ratio(list(per_worker.values())),
        "recompute_amplification": _amplification(prefilled, replay, workload, block_size),
        "handoff_bytes": _sum(call.handoff_bytes for call in done),
        "handoff_ms": _handoff_ms(before, after),
        "kv_bytes_peak": kv_bytes_peak,
        "preemptions": sum(
            _change(was.preemptions if was else 0, now.preemptions)
            for was, now in _pairs(before, after)
        ),
        "rejected_sessions": rejected,
        "failed_sessions": len(by_session) - len(whole) - rejected,
        "sessions": len(by_session),
        "calls": len(done),
        "wall_s": round(replay.wall_s, _DIGITS),
    }


def prefilled_per_worker(
    before: Sequence[WorkerCounts], after: Sequence[WorkerCounts]
) -> dict[str, int]:
    """Prompt tokens that each worker computed: what it looked up less what it found.

    Decode workers are left out, for they are handed their prompts.
    """
    return {
        now.id: _change(was.query_tokens if was else 0, now.query_tokens)
        - _change(was.hit_tokens if was else 0, now.hit_tokens)
        for was, now in _pairs(before, after)
        if now.phase != "decode"
    }


def _handoff_ms(before: Sequence[WorkerCounts], after: Sequence[WorkerCounts]) -> float | None:
    """Mean time of a transfer between workers, which their own counters tell."""
    pairs = _pairs(before, after)
    count = sum(_change(was.handoffs if was else 0, now.handoffs) for was, now in pairs)
    took = sum(
        _change(was.handoff_seconds if was else 0, now.handoff_seconds) for was, now in pairs
    )
    return round(1000 * took / count, _DIGITS) if count else None


def load_ratio(prefilled: Sequence[int]) -> float | None:
    """The most that a worker computed through the least.

    None if one computed nothing, or is the only one.
    """
    if len(prefilled) < 2 or min(prefilled) <= 0:
        return None
    return round(max(prefilled) / min(prefilled), _DIGITS)


def interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """95% confidence interval of the mean over repeats: percentiles of drawn samples (bootstrap).

    Raises ValueError if there are no values. One value says nothing: it is both ends then.
    """
    if not values:
        raise ValueError("values is empty; an interval needs one repeat or more")
    chance = np.random.default_rng(seed)
    means = chance.choice(np.asarray(values, float), (DRAWS, len(values))).mean(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def ratios(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float | None]:
    """How many times better `ours` is, measure by measure; above 1 it is better.

    None where it cannot be said: a figure is missing, or only one of the two is 0.
    """
    lower = {name: _ratio(theirs.get(name), ours.get(name)) for name in LOWER_IS_BETTER}
    higher = {name: _ratio(ours.get(name), theirs.get(name)) for name in HIGHER_IS_BETTER}
    return lower | higher


def _ratio(above: float | None, below: float | None) -> float | None:
    if above is None or below is None:
        return None
    if above == below:
        return 1.0
    return round(above / below, _DIGITS) if above and below else None


def _amplification(
    prefilled: int | None, replay: Replay, workload: Workload, block_size: int
) -> float | None:
    """Computed tokens through those of the same calls if each history's prefix came once.

    The head that all sessions have in common is needed once, so that 1 is the least.
    """
    if prefilled is None:
        return None
    made = Counter(call.session for call in replay.calls if call.ok)
    needed = workload.needed(made, block_size=block_size)
    return round(prefilled / sum(needed.values()), _DIGITS) if needed else None


def _hit_rate(before: Sequence[WorkerCounts], after: Sequence[WorkerCounts]) -> float | None:
    pairs = [(was, now) for was, now in _pairs(before, after) if now.phase != "decode"]
    queries = sum(_change(was.query_tokens if was else 0, now.query_tokens) for was, now in pairs)
    hits = sum(_change(was.hit_tokens if was else 0, now.hit_tokens) for was, now in pairs)
    return round(hits / queries, _DIGITS) if queries else None


def _pairs(
    before: Sequence[WorkerCounts], after: Sequence[WorkerCounts]
) -> list[tuple[WorkerCounts | None, WorkerCounts]]:
    known = {state.id: state for state in before}
    return [(known.get(state.id), state) for state in after]


def _change(was: Count, now: Count) -> Count:
    """Of a counter, which begins at 0 again when its worker does."""
    return now - was if now >= was else now


def _spread(front: str, unit: str, values: Sequence[float]) -> Figures:
    return {f"{front}mean{unit}": _mean(values), **_percentiles(front, unit, values)}


def _percentiles(front: str, unit: str, values: Sequence[float]) -> Figures:
    found: Iterable[float | None] = [None] * len(_PERCENTILES)
    if values:
        found = [round(float(value), _DIGITS) for value in np.percentile(values, _PERCENTILES)]
    return {
        f"{front}p{percent}{unit}": value
        for percent, value in zip(_PERCENTILES, found, strict=True)
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(float(np.mean(values)), _DIGITS) if values else None


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, _DIGITS) if seconds > 0 else None


def _sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
