"""A report for the terminal. Apart from its values, so that nobody else loads rich."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from prefillshare_prefix.report import Finding, Report
from prefillshare_prefix.texts import common_prefix


def shown(report: Report) -> RenderableType:
    parts: list[RenderableType] = []
    if report.rows:
        parts += [_table(report), Text()]
    for finding in report.findings:
        parts += [*_finding(finding, report), Text()]
    parts.append(summed(report))
    return Group(*parts)


def _table(report: Report) -> Table:
    title = Text(f"session {report.session or '(none)'}")  # an id may look like markup
    table = Table(title=title, title_justify="left")
    table.add_column("call", justify="right")
    table.add_column("role", overflow="fold")
    for name in ("prompt tokens", "shared", "lost"):
        table.add_column(name, justify="right")
    about = _about(report)
    for row in report.rows:
        part = row.shared_tokens / row.prompt_tokens if row.prompt_tokens else 0
        table.add_row(
            f"{row.index}",
            Text(row.role),
            f"{about}{row.prompt_tokens:,}",
            f"{about}{row.shared_tokens:,} ({part:.0%})",
            Text(f"{about}{row.lost_tokens:,}", "red") if row.lost_tokens else "",
        )
    return table


def _finding(finding: Finding, report: Report) -> list[RenderableType]:
    broken = finding.broken
    head = Text.assemble(
        (f"call {finding.call}", "bold red"),
        (f" {finding.role}: ", "bold"),
        (broken.cause.value, "bold red"),
        f"  {broken.detail}",
    )
    where = []
    if finding.token_index is not None:
        where.append(f"parts from {_call(finding.previous_call)} at token {finding.token_index:,}")
    if finding.lost_tokens is not None:
        where.append(f"{_about(report)}{finding.lost_tokens:,} tokens lost")
    lines = Table.grid(padding=(0, 1))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column()
    if where:
        lines.add_row("where", Text("; ".join(where)))
    expected, found = _marked(broken.expected, broken.found)
    lines.add_row("expected", expected)
    lines.add_row("found", found)
    lines.add_row("why", Text(broken.words))
    lines.add_row("fix", Text(broken.fix, "green"))
    return [head, Padding(lines, (0, 0, 0, 2))]


def _marked(expected: str, found: str) -> tuple[Text, Text]:
    """Both texts with what differs set off, by brackets where there are no colours."""
    start = common_prefix(expected, found)
    limit = min(len(expected), len(found)) - start
    end = min(common_prefix(expected[::-1], found[::-1]), limit)

    def mark(text: str) -> Text:
        stop = len(text) - end
        return Text.assemble(
            text[:start], ("⟦" + text[start:stop] + "⟧", "bold yellow"), text[stop:]
        )

    return mark(expected), mark(found)


def summed(report: Report) -> Text:
    """The last line of a report."""
    about = _about(report)
    text = Text.assemble(
        f"{report.calls} {'call' if report.calls == 1 else 'calls'}, "
        f"{about}{report.prompt_tokens:,} prompt tokens, ",
        (f"{about}{report.shared_ratio:.1%} shared", "bold"),
        f"; {report.breaks} {'break' if report.breaks == 1 else 'breaks'}",
    )
    if report.breaks:
        lost = f", {about}{report.lost_tokens:,} tokens lost; with the fixes: "
        text.append(lost).append(f"{about}{report.fixed_ratio:.1%}", "bold green")
    return text


def _about(report: Report) -> str:
    return "≈" if report.estimated else ""


def _call(index: int | None) -> str:
    return "the calls before" if index is None else f"call {index}"
