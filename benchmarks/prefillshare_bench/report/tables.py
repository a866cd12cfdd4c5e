"""Results files as tables for a reader: ours beside the paper's, ratios beside both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prefillshare_bench.report.compare import ratio
from prefillshare_bench.report.labels import MEASURES, OURS, SYSTEMS

UNKNOWN: Final = "—"
_PLACES: Final = {
    "rate": "sessions per second",
    "limit": "sessions at once",
    "input_length": "input length",
    "roles": "roles",
}
Content = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Cells are ready to be read. `folded`: shown only when asked for."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    folded: bool = False


def by_system(caption: str, systems: Mapping[str, Content | None], names: Sequence[str]) -> Table:
    """A row for each system, a column for each measure."""
    rows = [
        (label(system), *(shown(name, (found or {}).get(name)) for name in names))
        for system, found in systems.items()
    ]
    return Table(caption, ("system", *map(column, names)), tuple(rows))


def ratios(
    caption: str,
    found: Mapping[str, Mapping[str, float | None]],
    names: Sequence[str],
    intervals: Mapping[str, Mapping[str, Sequence[float]]],
    more: Iterable[tuple[str, Mapping[str, float | None]]] = (),
) -> Table:
    """A row for each baseline: how many times better PrefillShare is. `more`: rows of others."""
    rows = [
        (
            label(baseline),
            *(_times(own.get(name), intervals.get(baseline, {}).get(name)) for name in names),
        )
        for baseline, own in found.items()
    ]
    rows += [(title, *(_times(own.get(name), None) for name in names)) for title, own in more]
    header = ("PrefillShare against", *(MEASURES[name].label for name in names))
    return Table(caption, header, tuple(rows))


def pairs(caption: str, rows: Sequence[Content], place: str, names: Sequence[str]) -> Table:
    """The shape of Tables 3, 5 and 9: baseline, PrefillShare and ratio of each measure.

    `rows` are ours (systems under `systems`) or the paper's (beside the place itself).
    """
    header = [_PLACES[place]]
    for name in names:
        header += [f"baseline: {column(name)}", "PrefillShare", "ratio"]
    cells: list[tuple[str, ...]] = []
    for row in rows:
        systems = row.get("systems", row)
        theirs, ours = systems.get("per_model") or {}, systems.get(OURS) or {}
        known = row.get("ratios", {}).get("per_model", {})
        line = [number(row[place])]
        for name in names:
            mine, other = ours.get(name), theirs.get(name)
            times = known.get(name, ratio(name, mine, other))
            line += [shown(name, other), shown(name, mine), _times(times, None)]
        cells.append(tuple(line))
    return Table(caption, tuple(header), tuple(cells))


def everything(caption: str, rows: Sequence[Content], place: str, names: Sequence[str]) -> Table:
    """Each place of a sweep with each of its systems."""
    cells = [
        (
            number(row[place]),
            label(system),
            *(shown(name, found.get(name)) for name in names),
            number(found.get("limit")),
            number(found.get("repeats")),
            "yes" if found["survived"] else "no",
        )
        for row in rows
        for system, found in row["systems"].items()
    ]
    header = (
        _PLACES[place],
        "system",
        *map(column, names),
        "at once, at most",
        "repeats",
        "all completed",
    )
    return Table(caption, header, tuple(cells), folded=True)


def tried(caption: str, rows: Sequence[Content], names: Sequence[str]) -> Table:
    """Each rate and limit with each system."""
    cells = [
        (
            number(row["rate"]),
            number(row["limit"]),
            label(row["system"]),
            *(shown(name, row.get(name)) for name in names),
        )
        for row in rows
    ]
    header = ("sessions per second", "at once, at most", "system", *map(column, names))
    return Table(caption, header, tuple(cells), folded=True)


def label(system: str) -> str:
    """What a reader calls it."""
    return SYSTEMS[system].label if system in SYSTEMS else system


def column(measure: str) -> str:
    """The name of a measure with its unit."""
    known = MEASURES[measure]
    return f"{known.label} ({known.unit})" if known.unit else known.label


def shown(measure: str, value: float | None) -> str:
    """A value in the unit of its column."""
    return UNKNOWN if value is None else number(value * MEASURES[measure].scale)


def number(value: Any) -> str:
    """Three digits that count, whole from a hundred on: 0.0123, 4.56, 12.3, 9,560,000."""
    if value is None:
        return UNKNOWN
    if not isinstance(value, int | float):
        return str(value)
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _times(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return UNKNOWN
    text = f"{value:.2f}×" if value < 100 else f"{value:,.0f}×"
    return text if interval is None else f"{text} ({interval[0]:.2f} to {interval[1]:.2f})"
