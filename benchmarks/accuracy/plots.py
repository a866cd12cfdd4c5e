"""The figures as pictures, drawn from the JSON that is kept beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

GREY, RED, BLUE, LIGHT_BLUE, LIGHT_RED = "#777777", "#c44e52", "#2f6db0", "#8fb8de", "#e3a6a8"


def sharing_ratio(figures: Mapping[str, Any], path: Path) -> None:
    """Fig. 2: accuracy over the share of the prompt's KV that is the base's."""
    with _figure(path, columns=2, width=10.5) as (left, right):
        seeds = len(figures["seeds"])
        lines = {
            "own_full_ft": ("Full-FT, its own KV", GREY, "--"),
            "naive": ("Full-FT on the base's KV (naive)", RED, "o-"),
            "prefillshare": ("PrefillShare (trained for 100%)", BLUE, "s-"),
        }
        for axes, source, title in (
            (left, figures, "the first part of the prompt"),
            (right, figures["by_layer"], "the first part of the layers"),
        ):
            ratios = [100 * ratio for ratio in source["ratios"]]
            for name, (label, colour, style) in lines.items():
                mean, each = source[name]["mean"], source[name]["seeds"]
                _with_range(axes, ratios, mean, list(each.values()), label, colour, style)
            axes.set_title(f"Base KV for {title}", fontsize=10)
            axes.set_xlabel("share of the KV that is the base's (%)")
            axes.set_ylim(-3, 105)
        left.set_ylabel(f"addition: exact answers (%)\nmean and range of {seeds} seeds")
        left.legend(loc="center", fontsize=8.5, frameon=False)


def accuracy(figures: Mapping[str, Any], path: Path) -> None:
    """Tables 1 and 13: for every task, a bar for every method, with 95% intervals."""
    about: Mapping[str, Any] = figures["about"]
    tasks: Mapping[str, Mapping[str, Any]] = {
        name: methods for name, methods in figures.items() if methods is not about
    }
    colours = {
        "base": "#bbbbbb",
        "full-ft": GREY,
        "naive": RED,
        "prefillshare": BLUE,
        "full-ft-lora": "#a3a3a3",
        "naive-lora": LIGHT_RED,
        "prefillshare-lora": LIGHT_BLUE,
    }
    with _figure(path, columns=1, width=9) as (axes,):
        shown = [name for name in colours if any(name in methods for methods in tasks.values())]
        width = 0.8 / len(shown)
        for place, name in enumerate(shown):
            label = about["methods"][name]
            for number, methods in enumerate(tasks.values()):
                if name not in methods:
                    continue
                value, (low, high) = methods[name]["accuracy"], methods[name]["ci95"]
                axes.bar(
                    number + (place - (len(shown) - 1) / 2) * width,
                    value,
                    width * 0.92,
                    color=colours[name],
                    label=label,
                    yerr=[[max(value - low, 0)], [max(high - value, 0)]],
                    error_kw={"elinewidth": 0.9, "capsize": 2},
                )
                label = None  # Once in the legend.
        sizes = [next(iter(methods.values()))["n"] for methods in tasks.values()]
        names = [f"{task}\nn = {size}" for task, size in zip(tasks, sizes, strict=True)]
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel("accuracy (%), 95% interval")
        axes.set_title(about["model"], fontsize=10)
        axes.legend(fontsize=8, frameon=False)


def training_cost(figures: Mapping[str, Any], path: Path) -> None:
    """Speed and memory of prefillshare relative to full-ft."""
    with _figure(path, columns=2, width=9) as (left, right):
        for axes, key, title in (
            (left, "tokens_per_s_ratio", "tokens per second (higher is better)"),
            (right, "peak_memory_ratio", "peak memory (lower is better)"),
        ):
            values = [case[key] for case in figures["cases"]]
            names = [
                f"{case['shape'].replace('_', '-')}\n{'LoRA' if case['lora'] else 'all weights'}"
                for case in figures["cases"]
            ]
            bars = axes.bar(range(len(values)), values, 0.6, color=BLUE)
            axes.bar_label(bars, fmt="%.2f", fontsize=9)
            axes.axhline(1, color=GREY, linestyle="--", linewidth=1)
            axes.set_xticks(range(len(names)), names, fontsize=8)
            axes.set_title(title, fontsize=10)
            axes.set_ylim(0, max([*values, 1]) * 1.15)
        left.set_ylabel("prefillshare / full-ft")


def _with_range(
    axes: Axes,
    x: Sequence[float],
    mean: Sequence[float],
    each: Sequence[Sequence[float]],
    label: str,
    colour: str,
    style: str,
) -> None:
    below = [centre - min(values) for centre, *values in zip(mean, *each, strict=True)]
    above = [max(values) - centre for centre, *values in zip(mean, *each, strict=True)]
    errors = [[max(error, 0) for error in side] for side in (below, above)]
    axes.errorbar(
        x, mean, yerr=errors, fmt=style, color=colour, label=label, markersize=4.5, capsize=2.5
    )


@contextmanager
def _figure(path: Path, *, columns: int, width: float) -> Iterator[list[Axes]]:
    """Axes side by side; saved to `path` when the block ends well."""
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(width, 4), dpi=150, layout="constrained")
        yield list(figure.subplots(1, columns, squeeze=False)[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
