"""Points that differ in their repeat alone, as one: means, intervals, and whether all survived."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prefillshare_bench.report import compare, sessions
from prefillshare_bench.report.labels import HEADLINES, MEASURES, OURS, SYSTEMS
from prefillshare_bench.report.points import Point


@dataclass(frozen=True)
class Summary:
    """One system under one load, over all repeats. `figures` are means."""

    system: str
    points: tuple[Point, ...]

    @property
    def survived(self) -> bool:
        return all(point.survived for point in self.points)

    @property
    def figures(self) -> dict[str, float | None]:
        """The mean of every measure the points know; None where no repeat has a value."""
        names = [name for name in MEASURES if any(name in p.figures for p in self.points)]
        return {name: _mean(self.each(name).values()) for name in names}

    def each(self, measure: str) -> dict[int, float]:
        """{number of the repeat: value}, without those that have none."""
        return {
            point.repeat: float(point.figures[measure])
            for point in self.points
            if point.figures.get(measure) is not None
        }

    def shared_with(self, other: Summary) -> Summary:
        """Its points of the repeats that `other` has too."""
        repeats = {point.repeat for point in other.points}
        return Summary(self.system, tuple(p for p in self.points if p.repeat in repeats))

    def row(self) -> dict[str, Any]:
        """What a results file says of it."""
        return {
            **self.figures,
            "survived": self.survived,
            "limit": self.points[0].limit,
            "repeats": len(self.points),
        }


Axis = Callable[[Point], Any]


def sweep(points: Iterable[Point], axis: Axis) -> dict[Any, dict[str, Summary]]:
    """{place on the axis: {system: its summary}}, in ascending order; systems in their own order.

    Several limits or rates at one place: the best counts, as in the paper's Fig. 4.
    """
    settings: dict[tuple[Any, str], dict[Any, list[Point]]] = {}
    for point in points:
        place = axis(point)
        if place is not None:
            loads = settings.setdefault((place, point.system), {})
            loads.setdefault((point.rate, point.limit), []).append(point)
    found: dict[Any, dict[str, Summary]] = {}
    for place in sorted({place for place, _ in settings}):
        systems = in_order(s for p, s in settings if p == place)
        found[place] = {
            system: _best(
                Summary(system, tuple(repeats)) for repeats in settings[place, system].values()
            )
            for system in systems
        }
    return found


def tried(points: Iterable[Point]) -> list[dict[str, Any]]:
    """Every rate and limit that was measured, also those that were not the best for a system."""
    loads: dict[tuple[str, float | None, int | None], list[Point]] = {}
    for point in points:
        loads.setdefault((point.system, point.rate, point.limit), []).append(point)
    order = in_order(system for system, _, _ in loads)
    ranked = sorted(loads, key=lambda at: (at[1] or 0, order.index(at[0]), at[2] or 0))
    return [
        {"system": at[0], "rate": at[1], **Summary(at[0], tuple(loads[at])).row()} for at in ranked
    ]


def load_axis(points: Iterable[Point]) -> tuple[str, Axis]:
    """What load means here, with its name: the rate; the limit, if every loop was closed."""
    if any(point.rate is not None for point in points):
        return "rate", lambda point: point.rate
    return "limit", lambda point: point.limit


def row(place: str, value: Any, systems: Mapping[str, Summary]) -> dict[str, Any]:
    """One place of a sweep for a results file: each system, and PrefillShare against each."""
    rows = {system: summary.row() for system, summary in systems.items()}
    return {place: value, "systems": rows, **against(systems, HEADLINES)}


def against(
    systems: Mapping[str, Summary], with_interval: Collection[str] = MEASURES
) -> dict[str, Any]:
    """`ratios` per baseline, and `ratios_ci95` (see `intervals`).

    A repeat has sessions of its own, so both sides are those of the repeats that both have.
    """
    if OURS not in systems:
        return {"ratios": {}, "ratios_ci95": {}}
    pairs = {
        name: (systems[OURS].shared_with(summary), summary.shared_with(systems[OURS]))
        for name, summary in systems.items()
        if name != OURS
    }
    found = {
        name: compare.ratios(ours.figures, theirs.figures) for name, (ours, theirs) in pairs.items()
    }
    intervals = {
        name: {
            measure: interval
            for measure in found[name]
            if measure in with_interval and (interval := _ratio_interval(measure, ours, theirs))
        }
        for name, (ours, theirs) in pairs.items()
    }
    return {"ratios": found, "ratios_ci95": {name: own for name, own in intervals.items() if own}}


def intervals(summary: Summary) -> dict[str, list[float]]:
    """95% intervals of its means over repeats; with one repeat, of its latencies over sessions."""
    found = {
        name: sessions.interval(name, summary.points[0])
        if len(summary.points) == 1
        else compare.interval(list(summary.each(name).values()))
        for name in summary.figures
    }
    return {name: interval for name, interval in found.items() if interval is not None}


def _ratio_interval(measure: str, ours: Summary, theirs: Summary) -> list[float] | None:
    if len(ours.points) == len(theirs.points) == 1 and _same_sessions(*ours.points, *theirs.points):
        return sessions.ratio_interval(measure, ours.points[0], theirs.points[0])
    return compare.ratio_interval(measure, ours.each(measure), theirs.each(measure))


def _same_sessions(one: Point, other: Point) -> bool:
    return bool(one.workload.get("sha256") == other.workload.get("sha256"))


def in_order(systems: Iterable[str]) -> list[str]:
    """Each once: those known in the order of `SYSTEMS`, then the others."""
    known = list(SYSTEMS)
    return sorted(
        set(systems), key=lambda name: (known.index(name) if name in known else len(known), name)
    )


def highest_survived(places: Mapping[Any, Mapping[str, Summary]], of: Iterable[str]) -> Any | None:
    """The highest place where every system of `of` was measured and survived; None if nowhere."""
    wanted = list(of)
    return next(
        (
            place
            for place in reversed(list(places))
            if all(name in places[place] and places[place][name].survived for name in wanted)
        ),
        None,
    )


def _best(settings: Iterable[Summary]) -> Summary:
    """What survives before what does not, then the lowest p95 of a session, waiting included."""

    def worth(summary: Summary) -> tuple[bool, float]:
        latency = summary.figures.get("session_p95_s")
        return not summary.survived, float("inf") if latency is None else latency

    return min(settings, key=worth)


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return round(sum(known) / len(known), 6) if known else None
