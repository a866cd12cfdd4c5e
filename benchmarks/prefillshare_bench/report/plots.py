"""The plots of the results files: what is drawn, not how it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from prefillshare_bench.report.labels import MEASURES, OURS, SYSTEMS, System
from prefillshare_bench.report.tables import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Content = Mapping[str, Any]


def over_load(content: Content, axes: Sequence[Axes]) -> None:
    """Fig. 4: p95 of a session, p95 of a call and throughput over the load."""
    rows, place, label = _load(content)
    for plot, measure in zip(axes, ("session_p95_s", "p95_s", "throughput_tok_s"), strict=True):
        _lines(plot, rows, place, measure, label)
        if measure != "throughput_tok_s":
            _logarithmic(plot, _values(rows, measure))
    _legend(axes)


def swarm(content: Content, axes: Sequence[Axes]) -> None:
    """Table 5: TTFT and throughput over the load."""
    rows, place, label = _load(content)
    for plot, measure in zip(axes, ("ttft_ms", "throughput_tok_s"), strict=True):
        _lines(plot, rows, place, measure, label)
    _logarithmic(axes[0], _values(rows, "ttft_ms"))
    _legend(axes)


def over_limit(content: Content, axes: Sequence[Axes]) -> None:
    """Fig. 8: throughput and hit rate over the sessions at once."""
    for plot, measure in zip(axes, ("throughput_tok_s", "hit_rate"), strict=True):
        _lines(plot, content["limits"], "limit", measure, "sessions at once, at most")
    axes[1].set_ylim(0, 105)
    _legend(axes)


def over_roles(content: Content, axes: Sequence[Axes]) -> None:
    """Prefilled tokens, and KV that the prefill workers keep, over the number of roles."""
    for plot, measure in zip(axes, ("prefilled_tokens", "kv_prefill_bytes"), strict=True):
        _lines(plot, content["roles"], "roles", measure, "roles")
        plot.set_xticks([row["roles"] for row in content["roles"]])
    _legend(axes)


def rows(content: Content, axes: Sequence[Axes]) -> None:
    """Tables 6 and 7: a bar for each row, in four measures."""
    shown = ("mean_ttft_s", "session_p95_s", "throughput_tok_s", "hit_percent")
    bars = {row["system"]: row for row in content["rows"] if row["repeats"]}
    for plot, measure in zip(axes, shown, strict=True):
        _bars(plot, {name: row[measure] for name, row in bars.items()}, measure)
    _legend_of_bars(axes, list(bars))


def lengths(content: Content, axes: Sequence[Axes]) -> None:
    """Table 9: TTFT and throughput, a group of bars for each input length."""
    found = content["lengths"]
    systems = _systems(found)
    for plot, measure in zip(axes, ("ttft_ms", "throughput_tok_s"), strict=True):
        width = 0.8 / max(len(systems), 1)
        for number, name in enumerate(systems):
            offset = (number - (len(systems) - 1) / 2) * width
            known = [
                (place + offset, value)
                for place, row in enumerate(found)
                if (value := _value(row, name, measure)) is not None
            ]
            if known:
                x, heights = zip(*known, strict=True)
                plot.bar(x, heights, width * 0.92, color=_system(name).colour)
        plot.set_xticks(range(len(found)), [f"{row['input_length']:,}" for row in found])
        plot.set_xlabel("input length (tokens, before scaling)")
        _title(plot, measure)
    _logarithmic(axes[0], _values(found, "ttft_ms"))
    _legend_of_bars(axes, systems)


def kept(content: Content, axes: Sequence[Axes]) -> None:
    """Table 11: KV kept, in all and per session."""
    for plot, measure in zip(axes, ("kv_bytes", "kv_bytes_per_session"), strict=True):
        _bars(plot, {name: row[measure] for name, row in content["systems"].items()}, measure)
    _legend_of_bars(axes, list(content["systems"]))


Draw = Callable[[Content, "Sequence[Axes]"], None]
PLOTS: Final[Mapping[str, tuple[Draw, int]]] = {
    "serving_react": (over_load, 3),
    "serving_reflexion": (over_load, 3),
    "attribution": (rows, 4),
    "prediction": (rows, 4),
    "low_overlap": (over_load, 3),
    "concurrency": (over_limit, 2),
    "input_length": (lengths, 2),
    "swarm": (swarm, 2),
    "roles_scaling": (over_roles, 2),
    "memory": (kept, 2),
    "long_output": (over_load, 3),
}
"""By the name of the results file: who draws it, on how many axes."""


def _load(content: Content) -> tuple[Sequence[Content], str, str]:
    """The loads, what they are called in the file, and on the axis."""
    rows = content["loads"]
    if rows and "rate" in rows[0]:
        return rows, "rate", "sessions per second"
    return rows, "limit", "sessions at once"


def _lines(plot: Axes, rows: Sequence[Content], place: str, measure: str, label: str) -> None:
    for name in _systems(rows):
        known = [
            (row[place], value, row["systems"][name]["survived"])
            for row in rows
            if (value := _value(row, name, measure)) is not None
        ]
        if not known:
            continue
        style = _system(name)
        x, y, _ = zip(*known, strict=True)
        plot.plot(x, y, color=style.colour, linewidth=1.6, label=style.label, zorder=_above(name))
        for survived in (True, False):
            marked = [(a, b) for a, b, s in known if s is survived]
            if marked:
                plot.plot(
                    *zip(*marked, strict=True),
                    linestyle="none",
                    marker=style.marker,
                    markersize=5,
                    color=style.colour,
                    markerfacecolor=style.colour if survived else "none",
                    zorder=_above(name),
                )
    plot.set_xlabel(label)
    plot.set_ylim(bottom=0)
    if place != "rate":
        plot.locator_params("x", integer=True)
    _title(plot, measure)


def _bars(plot: Axes, values: Mapping[str, float | None], measure: str) -> None:
    scale = MEASURES[measure].scale
    heights = [(value or 0) * scale for value in values.values()]
    bars = plot.bar(
        range(len(values)), heights, 0.7, color=[_system(name).colour for name in values]
    )
    texts = [shown(measure, value) for value in values.values()]
    plot.bar_label(bars, texts, fontsize=8)
    plot.set_xticks([])
    plot.margins(y=0.12)
    _title(plot, measure)


def _title(plot: Axes, measure: str) -> None:
    known = MEASURES[measure]
    plot.set_title(f"{known.label} ({known.unit})" if known.unit else known.label, fontsize=9.5)
    plot.yaxis.set_major_formatter("{x:,.10g}")


def _logarithmic(plot: Axes, values: Iterable[float | None]) -> None:
    """Where it shows more: an empty axis or one with a zero has no logarithm."""
    heights = [value for value in values if value is not None]
    if heights and min(heights) > 0 and max(heights) > 20 * min(heights):
        plot.set_yscale("log")
        plot.set_ylim(min(heights) / 1.3, max(heights) * 1.3)
        plot.yaxis.set_major_formatter("{x:,.10g}")


def _values(rows: Sequence[Content], measure: str) -> Iterator[float | None]:
    return (_value(row, name, measure) for row in rows for name in row["systems"])


def _legend(axes: Sequence[Axes]) -> None:
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        axes[0].figure.legend(
            handles, labels, loc="outside lower center", ncols=3, fontsize=8.5, frameon=False
        )


def _legend_of_bars(axes: Sequence[Axes], names: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    if names:
        axes[0].figure.legend(
            handles=[Patch(color=_system(n).colour, label=_system(n).label) for n in names],
            loc="outside lower center",
            ncols=3,
            fontsize=8.5,
            frameon=False,
        )


def _systems(rows: Sequence[Content]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["systems"]))


def _value(row: Content, system: str, measure: str) -> float | None:
    found = row["systems"].get(system, {}).get(measure)
    return None if found is None else float(found) * MEASURES[measure].scale


def _system(name: str) -> System:
    return SYSTEMS.get(name, System(name, "#8a8a8a", "."))


def _above(name: str) -> int:
    return 4 if name == OURS else 3
