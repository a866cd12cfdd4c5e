"""ReAct and Reflexion over the load: the paper's Fig. 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from prefillshare_bench import paper
from prefillshare_bench.report import summary
from prefillshare_bench.report.about import about
from prefillshare_bench.report.labels import OURS, SERVING, SYSTEMS
from prefillshare_bench.report.points import Point
from prefillshare_bench.report.summary import Summary

_ADDED: Final = ("session_p50_s", "session_p95_s", "ttft_p95_ms", "generated_tok_s")


def serving(points: Sequence[Point]) -> dict[str, Any]:
    """Every system at the highest load that all survive, ratios there, and every load measured.

    A system survives a load if every session of every repeat completes. `load` is None, and so are
    the systems, where no load is survived by all that were measured.
    """
    place, axis = summary.load_axis(points)
    loads = summary.sweep(points, axis)
    systems = summary.in_order(point.system for point in points)
    load = summary.highest_survived(loads, systems)
    at_load = loads[load] if load is not None else {}
    rows = [summary.row(place, value, found) for value, found in loads.items()]
    return {
        **{name: _headline(at_load.get(name)) for name in systems},
        "load": None if load is None else {place: load},
        **summary.against(at_load),
        "ci95": {name: summary.intervals(found) for name, found in at_load.items()},
        "up_to": _up_to(rows, place),
        "missing": [name for name in SYSTEMS if name not in systems],
        "not_survived": _not_survived(rows, place),
        "loads": rows,
        "tried": summary.tried(points),
        "paper": paper.SERVING.get(points[0].experiment if points else ""),
        "about": {
            **about(points),
            "load": "the highest at which every session of every measured system completed: none "
            "refused, no call failed. The systems' figures and `ratios` are taken there",
            "up_to": "the best ratio over all loads that both survived, as the paper counts",
        },
    }


def _headline(found: Summary | None) -> dict[str, Any] | None:
    if found is None:
        return None
    figures = found.figures
    return {
        **{name: figures.get(name) for name in (*SERVING, *_ADDED)},
        "limit": found.points[0].limit,
        "repeats": len(found.points),
    }


def _up_to(rows: Sequence[Mapping[str, Any]], place: str) -> dict[str, dict[str, Any]]:
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        for baseline, found in row["ratios"].items():
            if not (row["systems"][OURS]["survived"] and row["systems"][baseline]["survived"]):
                continue
            for measure, value in found.items():
                known = best.setdefault(baseline, {}).get(measure)
                if value is not None and (known is None or value > known["ratio"]):
                    best[baseline][measure] = {"ratio": value, place: row[place]}
    return best


def _not_survived(rows: Sequence[Mapping[str, Any]], place: str) -> dict[str, list[Any]]:
    lost: dict[str, list[Any]] = {}
    for row in rows:
        for system, found in row["systems"].items():
            if not found["survived"]:
                lost.setdefault(system, []).append(row[place])
    return lost
