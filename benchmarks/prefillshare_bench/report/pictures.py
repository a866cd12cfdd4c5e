"""Plots as pictures: SVG inside the page, in the colour of its text, and PNG for the docs."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import matplotlib
from matplotlib.figure import Figure

from prefillshare_bench.report.plots import PLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

_INK: Final = "#010203"
"""Drawn in by nobody else, so that it can become the colour of the text around the picture."""
_STYLE: Final = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.18,
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "prefillshare",
}
_NO_METADATA: Final = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def svg(name: str, content: Mapping[str, Any]) -> str:
    """The plot of a results file as an `<svg>` element that names no other address."""
    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context({**_STYLE, **dict.fromkeys((*inks, "grid.color"), _INK)}):
        buffer = io.StringIO()
        _drawn(name, content).savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    # Its rule is for every element, so that it would hold for the whole page.
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    # Groups are never referred to, and their names would come again in the next picture.
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    start = f'<svg class="plot" role="img" aria-label="{escape(name)}"'
    return re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', lambda tag: f"{start} {tag[1]}>", text)


def png(name: str, content: Mapping[str, Any], path: Path) -> None:
    """The plot of a results file as a PNG: the same bytes for the same content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_STYLE):
        _drawn(name, content).savefig(path, format="png", metadata={"Software": None})


def _drawn(name: str, content: Mapping[str, Any]) -> Figure:
    draw, columns = PLOTS.get(name, PLOTS["serving_react"])
    figure = Figure(figsize=(3.4 * columns + 0.6, 3.4), dpi=150, layout="constrained")
    axes: Sequence[Axes] = list(figure.subplots(1, columns, squeeze=False)[0])
    draw(content, axes)
    return figure
