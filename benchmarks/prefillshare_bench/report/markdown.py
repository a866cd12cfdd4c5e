"""The results files as a page of the documentation: the same tables as on the HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from prefillshare_bench import paper
from prefillshare_bench.report.files import FILES
from prefillshare_bench.report.sections import Section, sections
from prefillshare_bench.report.tables import Table

NAME: Final = "evaluation.md"


def write(folder: Path) -> Path:
    """Makes `evaluation.md` of all results files that `folder` has, whenever they were measured."""
    found: dict[str, Mapping[str, Any]] = {
        name: json.loads(file.read_text(encoding="utf-8"))
        for name in FILES
        if (file := folder / f"{name}.json").is_file()
    }
    page = folder / NAME
    page.write_text("\n".join(_page(found)), encoding="utf-8")
    return page


def _page(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "# The paper's evaluation: figures\n"
    yield (
        "Made by `prefillshare bench report`, of the results files beside it; what is compared and "
        "how, and what to make of it: [evaluation.md](../evaluation.md). Ratios say how many times "
        f"better PrefillShare is. The paper: {paper.SOURCE}.\n"
    )
    for section in sections(found):
        if section.content is not None:
            yield from _section(section, section.content)


def _section(section: Section, content: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {section.title}\n"
    yield f"{section.intro}\n"
    yield f"![{section.title}]({section.name}.png)\n"
    for table in section.tables:
        if not table.folded:
            yield from _table(table)
    for note in section.notes:
        yield f"- {note}"
    about = content["about"]
    machine = about["machine"]
    yield f"- Measured {about['date'][:10]}, {machine['cores']} cores ({machine['cpu']}):"
    for command in about["command"].split(" && "):
        yield f"  `{command}`"
    yield f"  ([{section.name}.json]({section.name}.json))\n"


def _table(table: Table) -> Iterator[str]:
    yield f"**{table.caption}**\n"
    yield f"| {' | '.join(table.header)} |"
    yield f"| {' | '.join('---' for _ in table.header)} |"
    for row in table.rows:
        yield f"| {' | '.join(row)} |"
    yield ""
