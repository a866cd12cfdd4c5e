"""One quantity varied: swarm and low overlap over the load, input length, limit, roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from prefillshare_bench import paper
from prefillshare_bench.experiments import EXPERIMENTS
from prefillshare_bench.report import summary
from prefillshare_bench.report.about import about
from prefillshare_bench.report.mechanisms import kept_bytes, mean, prefilling
from prefillshare_bench.report.points import Point
from prefillshare_bench.report.summary import Axis, Summary


def swarm(points: Sequence[Point]) -> dict[str, Any]:
    """Table 5: TTFT and throughput over the arrival rate, roles in random order."""
    return _over("loads", *summary.load_axis(points), points, paper.SWARM)


def long_output(points: Sequence[Point]) -> dict[str, Any]:
    """Answers much longer than the new part of a prompt, over the load; not in the paper."""
    return _over("loads", *summary.load_axis(points), points, None)


def low_overlap(points: Sequence[Point]) -> dict[str, Any]:
    """Table 4 over the load, and Table 8: what each worker prefilled at the highest load."""
    found = _over("loads", *summary.load_axis(points), points, paper.LOW_OVERLAP)
    place, axis = summary.load_axis(points)
    loads = summary.sweep(points, axis)
    load = summary.highest_survived(loads, summary.in_order(point.system for point in points))
    if load is None:
        load = max(loads, default=None)
    at_load = loads[load] if load is not None else {}
    return {
        **found,
        "overlap": _overlap(points),
        "workers": {
            "load": None if load is None else {place: load},
            "systems": {name: _workers(summary) for name, summary in at_load.items()},
            "paper": dict(paper.WORKER_LOAD),
        },
    }


def input_length(points: Sequence[Point]) -> dict[str, Any]:
    """Table 9: short and long inputs. `prompt_tokens` is what the first call really had."""
    found = _over("lengths", "input_length", lambda p: p.input_length, points, paper.INPUT_LENGTH)
    for row in found["lengths"]:
        row["prompt_tokens"] = _first_prompt(
            [point for point in points if point.input_length == row["input_length"]]
        )
    return found


def concurrency(points: Sequence[Point]) -> dict[str, Any]:
    """Fig. 8: throughput and hit rate over the sessions at once, and where each is highest."""
    found = _over("limits", "limit", lambda point: point.limit, points, paper.CONCURRENCY)
    peaks: dict[str, dict[str, Any]] = {}
    for row in found["limits"]:
        for system, figures in row["systems"].items():
            reached, best = figures.get("throughput_tok_s"), peaks.get(system)
            if reached is not None and (best is None or reached > best["throughput_tok_s"]):
                peaks[system] = {
                    "limit": row["limit"],
                    "throughput_tok_s": reached,
                    "hit_rate": figures.get("hit_rate"),
                }
    return {**found, "peaks": peaks}


def roles_scaling(points: Sequence[Point]) -> dict[str, Any]:
    """1, 2, 4, 8 roles: `growth` is each figure at the most roles over that at the fewest.

    `kv_kept_bytes` is KV that all workers keep of the context at the end, `kv_prefill_bytes` what
    those that prefill do: decode workers have a copy of what each of them has read.
    """
    found = _over("roles", "roles", lambda point: point.roles, points, None)
    for row in found["roles"]:
        for system, figures in row["systems"].items():
            there = [p for p in points if (p.system, p.roles) == (system, row["roles"])]
            figures["kv_prefill_bytes"] = mean([kept_bytes(point) for point in there])
            figures["kv_kept_bytes"] = mean([kept_bytes(point, decode=True) for point in there])
    growth: dict[str, dict[str, float]] = {}
    for system in summary.in_order(point.system for point in points):
        rows = [row["systems"][system] for row in found["roles"] if system in row["systems"]]
        fewest, most = rows[0], rows[-1]
        growth[system] = {
            name: round(most[name] / fewest[name], 4)
            for name in ("prefilled_tokens", "kv_prefill_bytes", "kv_kept_bytes")
            if fewest.get(name) and most.get(name) is not None
        }
    return {**found, "growth": growth}


def _over(
    rows: str,
    place: str,
    axis: Axis,
    points: Sequence[Point],
    theirs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    found = summary.sweep(points, axis)
    systems = summary.in_order(point.system for point in points)
    return {
        rows: [summary.row(place, value, at_place) for value, at_place in found.items()],
        "missing": [
            name for name in EXPERIMENTS[points[0].experiment].systems if name not in systems
        ],
        "paper": None if theirs is None else dict(theirs),
        "about": about(points),
    }


def _workers(found: Summary) -> dict[str, Any]:
    """What each worker computed, in the first repeat: an average would hide the imbalance."""
    point = found.points[0]
    roles = {worker["id"]: worker.get("role") for worker in prefilling(point, "after")}
    figures = found.figures
    return {
        "prefilled_per_worker": dict(point.figures.get("prefilled_per_worker") or {}),
        "roles": {worker: role for worker, role in roles.items() if role},
        **{
            name: figures.get(name)
            for name in ("prefilled_tokens", "load_ratio", "recompute_amplification")
        },
        "recompute_amplification_by_role": _amplification_by_role(point),
    }


def _overlap(points: Sequence[Point]) -> float | None:
    """The part of a prompt, in the mean, that prompts of other roles begin with as well."""
    sent = next((point.sent for point in points if point.sent is not None), None)
    if sent is None:
        return None
    lengths = [n for session in sent.sessions for n in session.prompt_tokens(sent.head) or []]
    return round(sent.head * len(lengths) / sum(lengths), 6) if lengths else None


def _amplification_by_role(point: Point) -> dict[str, float]:
    """Tokens computed for a role's calls over those that it needs if nothing is evicted (C.3).

    Empty without the sessions' file.
    """
    if point.sent is None:
        return {}
    known = [c for c in point.calls if not c["error"] and c["computed_tokens"] is not None]
    computed: Counter[str] = Counter()
    for call in known:
        computed[call["role"]] += call["computed_tokens"]
    needed = point.sent.needed(
        Counter(call["session"] for call in known),
        per_role=True,
        block_size=point.data["setting"]["block_size"],
    )
    return {role: round(computed[role] / tokens, 4) for role, tokens in (needed or {}).items()}


def _first_prompt(points: Sequence[Point]) -> float | None:
    first = [
        call["prompt_tokens"]
        for point in points
        for call in point.calls
        if call["index"] == 0 and call["prompt_tokens"]
    ]
    return round(sum(first) / len(first), 1) if first else None
