"""``prefillshare bench report``: the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report_command(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Where measured points lie, in it or below: one JSON file each.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PAGE.HTML",
            help="The page to write; by default FOLDER/report.html.",
            show_default=False,
        ),
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also write the figures (serving_react.json, attribution.json, …), plots (PNG) "
            "and all tables (evaluation.md) here. Files of experiments that FOLDER has no points "
            "of stay as they are.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Turn measured points into one HTML page: plots, tables beside the paper's, machine facts.

    The points are all it needs: nothing is measured, and no engine is started.
    The page is one file without links to others. Systems and experiments
    without points are shown as missing.

    [dim]Examples:[/dim]

      prefillshare bench report results/

      prefillshare bench report results/ --out page.html --docs docs/results
    """
    # matplotlib takes a second to load, and `--help` needs none of it.
    from prefillshare_bench.report import files, markdown, pictures
    from prefillshare_bench.report.page import page
    from prefillshare_bench.report.points import read

    console = Console(highlight=False, soft_wrap=True)
    points = read(folder)
    results = files.results(points)
    target = out or folder / "report.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(points, results, folder), encoding="utf-8")
    console.print(f"{len(points)} points, {len(results)} experiments: {target}")
    for name in files.FILES:
        if name not in results:
            console.print(f"[dim]missing: {name} (no points of it)[/dim]")
    if docs is not None:
        for name, content in results.items():
            files.write(content, docs / f"{name}.json")
            pictures.png(name, content, docs / f"{name}.png")
        console.print(f"figures and plots: {docs}; tables: {markdown.write(docs)}")
