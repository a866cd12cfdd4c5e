"""What each mechanism contributes: Tables 6 (attribution), 7 (prediction) and 11 (memory)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from prefillshare_bench import paper
from prefillshare_bench.report import compare, summary
from prefillshare_bench.report.about import about
from prefillshare_bench.report.labels import OURS
from prefillshare_bench.report.points import Point
from prefillshare_bench.report.summary import Summary

ATTRIBUTION: Final = ("per_model", "shared_pool", OURS)
PREDICTION: Final = ("per_model", "predictive", OURS)
SHAPE: Final = {
    "mean_ttft_s": ("ttft_ms", 1e-3),
    "session_p95_s": ("session_p95_s", 1),
    "p95_s": ("p95_s", 1),
    "throughput_tok_s": ("throughput_tok_s", 1),
    "local_prefill_tokens": ("prefilled_tokens", 1),
    "hit_percent": ("hit_rate", 100),
}
"""A column of Tables 6 and 7: our measure, and what it is multiplied with."""


def attribution(points: Sequence[Point]) -> dict[str, Any]:
    """Table 6: baseline, pool alone, pool and reuse; each row beside the paper's."""
    return _rows(points, ATTRIBUTION, paper.ATTRIBUTION)


def prediction(points: Sequence[Point]) -> dict[str, Any]:
    """Table 7: baseline, baseline with prefill ahead for the next role, PrefillShare."""
    return _rows(points, PREDICTION, paper.PREDICTION)


def memory(points: Sequence[Point]) -> dict[str, Any]:
    """Table 11, measured: bytes of KV that the prefill workers keep after the workload.

    Cached blocks times their bytes, in every worker that prefills; what lay there before the
    workload does not count. Per session: over the sessions of the workload.
    """
    places = summary.sweep(points, lambda point: 0)
    systems = places.get(0, {})
    ours = systems.get(OURS)
    return {
        "systems": {name: _kept(found) for name, found in systems.items()},
        "ratios": {
            name: compare.ratios(_kept(ours.shared_with(found)), _kept(found.shared_with(ours)))
            for name, found in systems.items()
            if ours and name != OURS
        },
        "missing": [name for name in ("per_model", OURS) if name not in systems],
        "paper": dict(paper.MEMORY),
        "about": {
            **about(points),
            "kv_bytes": "cached blocks x bytes of a block, over all workers that prefill, at the "
            "end of the workload less at its beginning; read from the engines, not computed",
            "memory_bytes": "all processes of the system after the workload, with weights and "
            "room for KV; what several share counts once (PSS), what lies on GPUs does not",
        },
    }


def _kept(found: Summary) -> dict[str, Any]:
    return {
        "kv_bytes": mean([kept_bytes(point) for point in found.points]),
        "kv_bytes_per_session": mean([_per_session(point) for point in found.points]),
        "cached_blocks": mean([_cached_blocks(point) for point in found.points]),
        "bytes_per_block": _bytes_per_block(found.points),
        "memory_bytes": mean([point.data.get("memory_bytes") for point in found.points]),
        "survived": found.survived,
        "repeats": len(found.points),
    }


def _rows(
    points: Sequence[Point], wanted: Sequence[str], theirs: Mapping[str, Any]
) -> dict[str, Any]:
    """Three systems at the highest load that they survive; at the highest all have, if none."""
    mine = [point for point in points if point.system in wanted]
    place, axis = summary.load_axis(mine)
    loads = summary.sweep(mine, axis)
    measured = summary.in_order(point.system for point in mine)
    load = summary.highest_survived(loads, measured)
    if load is None:
        complete = [place for place, found in loads.items() if len(found) == len(measured)]
        load = max(complete, default=None)
    at_load = loads[load] if load is not None else {}
    rows: list[dict[str, Any]] = [
        {"system": name, **_shaped(at_load.get(name)), "paper": theirs.get(name)} for name in wanted
    ]
    against = summary.against(at_load)
    return {
        "load": None if load is None else {place: load},
        "rows": rows,
        "ratios": _renamed(against["ratios"]),
        "ratios_ci95": _renamed(against["ratios_ci95"]),
        "paper_ratios": {
            name: compare.ratios(theirs[OURS], theirs[name]) for name in wanted if name != OURS
        },
        "missing": [row["system"] for row in rows if not row["repeats"]],
        "loads": [summary.row(place, value, found) for value, found in loads.items()],
        "paper": theirs["where"],
        "about": about(mine),
    }


def _shaped(found: Summary | None) -> dict[str, Any]:
    if found is None:
        return {**dict.fromkeys(SHAPE), "survived": None, "repeats": 0}
    figures = found.figures
    columns = {
        column: None if (value := figures.get(name)) is None else round(value * scale, 6)
        for column, (name, scale) in SHAPE.items()
    }
    return {**columns, "survived": found.survived, "repeats": len(found.points)}


def _renamed(ratios: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By the columns of SHAPE."""
    return {
        baseline: {column: found[name] for column, (name, _) in SHAPE.items() if name in found}
        for baseline, found in ratios.items()
    }


def prefilling(point: Point, when: str) -> list[Mapping[str, Any]]:
    """The states of the workers that compute prompts: all but those that only decode."""
    return [worker for worker in point.workers(when) if worker.get("phase") != "decode"]


def kept_bytes(point: Point, *, decode: bool = False) -> float | None:
    """KV that workers keep at the end less that at the beginning, with `decode` of all workers.

    None where an engine does not tell, or has no block left and may have thrown some away.
    """
    blocks = _cached_blocks(point, decode=decode)
    size = _bytes_per_block([point])
    return None if blocks is None or size is None else blocks * size


def _cached_blocks(point: Point, *, decode: bool = False) -> float | None:
    workers = point.workers if decode else partial(prefilling, point)
    starts, ends = workers("before"), workers("after")
    total = 0
    for start, end in zip(starts, ends, strict=True):
        first, last = start.get("cached_blocks"), end.get("cached_blocks")
        if first is None or last is None or last >= end["blocks"]:
            return None
        total += last - first
    return float(total) if ends else None


def _per_session(point: Point) -> float | None:
    kept = kept_bytes(point)
    sessions = len({call["session"] for call in point.calls})
    return kept / sessions if kept is not None and sessions else None


def _bytes_per_block(points: Sequence[Point]) -> int | None:
    """The same in all: they compute with one base. None where no engine tells."""
    sizes = [w.get("bytes_per_block") for p in points for w in prefilling(p, "after")]
    return next((size for size in sizes if size), None)


def mean(values: Sequence[float | None]) -> float | None:
    """None where one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
