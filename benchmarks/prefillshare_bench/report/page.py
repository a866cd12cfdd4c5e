"""The page: one HTML file that needs no other, and asks no network."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from prefillshare_bench import paper
from prefillshare_bench.report import pictures
from prefillshare_bench.report.about import commands, machines
from prefillshare_bench.report.points import Point
from prefillshare_bench.report.sections import sections
from prefillshare_bench.report.tables import pairs


def page(points: Sequence[Point], results: Mapping[str, Mapping[str, Any]], folder: Path) -> str:
    """HTML of what `files.results` made of `points`, which were read from `folder`."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("prefillshare_bench.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("page.html.j2").render(
        source=paper.SOURCE,
        sections=sections(results),
        plots={name: Markup(pictures.svg(name, found)) for name, found in results.items()},
        large_model=pairs(
            f"The paper: {paper.LARGE_MODEL['where']}",
            paper.LARGE_MODEL["loads"],
            "rate",
            ("throughput_tok_s", "ttft_ms"),
        ),
        machines=[json.dumps(facts, indent=2) for facts in machines(points)],
        commands=[*commands(points), shlex.join(["prefillshare", "bench", "report", str(folder)])],
        cluster_files=_cluster_files(points),
        points=len(points),
    )


def _cluster_files(points: Sequence[Point]) -> dict[str, str]:
    """What each system was started with, once."""
    return {
        point.system: str(point.data["cluster_file"])
        for point in reversed(points)
        if point.data.get("cluster_file")
    }
