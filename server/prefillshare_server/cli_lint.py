"""``prefillshare lint``: the command line. Works with the SDK's dependencies alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, RenderableType
from rich.progress import Progress
from typer.core import TyperCommand

from prefillshare_prefix import Layout, Report
from prefillshare_server.errors import ConfigError, Problem

_PROGRAM = "prefillshare_lint_program"
_SHOWN_ROWS = 40

LayoutName = Literal["context-first", "model"]


class LintCommand(TyperCommand):
    """Keeps what stands behind ``--`` apart: it is a program, not a trace."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_PROGRAM] = args[at + 1 :]
            args = args[:at]
        elif not args:
            args = ["--help"]
        return super().parse_args(ctx, args)


def lint(
    ctx: typer.Context,
    traces: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[TRACE.JSONL]… [-- PROGRAM …]",
            help="Recorded chat requests, one JSON object a line; or a program to run.",
            show_default=False,
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="A running server's base URL, with --session.", show_default=False),
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Look at this session only.", show_default=False)
    ] = None,
    session_key: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="Field of a line, or of its request, that names the session; dotted, for example "
            "[bold]metadata.thread[/bold].",
            show_default=False,
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Store name, folder or hub id: count with its template and tokenizer.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="CLUSTER.YAML",
            help="The same with a cluster's base and layout.",
            show_default=False,
        ),
    ] = None,
    layout: Annotated[
        LayoutName | None,
        typer.Option(
            help="[bold]context-first[/bold]: as PrefillShare's server writes prompts (default). "
            "[bold]model[/bold]: as ordinary servers do, system message and tools first.",
            show_default=False,
        ),
    ] = None,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where the program's requests go; by default $OPENAI_BASE_URL, else OpenAI.",
            show_default=False,
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the program's trace.", show_default=False),
    ] = None,
    min_shared: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Exit with 1 when less of all prompt tokens is shared.",
            show_default=False,
        ),
    ] = None,
    max_breaks: Annotated[
        int | None,
        typer.Option(min=0, help="Exit with 1 when there are more breaks.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Show where the prompts of a session stop sharing their beginning, why, and the fix.

    Needs no server and no GPU. Without --base or --cluster the counts are
    estimates, marked ≈.

    [dim]Examples:[/dim]

      prefillshare lint trace.jsonl

      prefillshare lint trace.jsonl --base smollm2-135m-instruct --layout model

      prefillshare lint -- python app.py

      prefillshare lint --max-breaks 0 --min-shared 0.8 -- pytest tests

      prefillshare lint --url http://127.0.0.1:8000/v1 --session order-4711

    A trace line is a request body, or an object with it under "body" or
    "request": OpenAI's batch files and what PREFILLSHARE_TRACE=trace.jsonl
    makes the SDK write, for example.

    [dim]Exit code:[/dim] 0; 1 over a limit; 2 for bad input; a program's own code if it
    fails.
    """
    program: list[str] | None = ctx.meta.get(_PROGRAM)
    _require_one_input(traces, url, program)
    _refuse_options_of_other_inputs(ctx, url, program)
    if url is not None:
        reports, code = [_running(url, session)], 0
    elif program is not None:
        from prefillshare_server.lint.program import recorded

        output = sys.stderr.fileno() if as_json else None
        with recorded(program, upstream=upstream, keep=save, output=output) as run:
            _tell(f"the program ended with exit code {run.exit_code}")
            reports, code = (
                _traced([run.trace], session, session_key, base, cluster, layout, run.exit_code),
                run.exit_code,
            )
    else:
        reports, code = _traced(traces or [], session, session_key, base, cluster, layout), 0
    whole = _whole(reports)
    if as_json:
        found: dict[str, Any] = {"sessions": [report.to_dict() for report in reports]}
        found |= {**_sum(whole), "program_exit_code": code if program is not None else None}
        typer.echo(json.dumps(found, indent=2))
    else:
        for part in _shown(reports, whole):
            Console().print(part)
    over = _over(whole, min_shared, max_breaks)
    for line in over:
        _tell(line, "red")
    raise typer.Exit(_shell_code(code) or bool(over))


def _require_one_input(
    traces: Sequence[Path] | None, url: str | None, program: list[str] | None
) -> None:
    given = [bool(traces), url is not None, program is not None]
    if sum(given) != 1:
        what = "several of a trace, --url and a program" if any(given) else "nothing to look at"
        remedy = "give a trace, or --url with --session, or a program behind --"
        raise ConfigError(Problem("prefillshare lint", what, remedy))
    if program == []:
        raise ConfigError(Problem("--", "no program follows", "write for example -- python app.py"))


def _refuse_options_of_other_inputs(
    ctx: typer.Context, url: str | None, program: list[str] | None
) -> None:
    if program is not None:
        return
    refused, what = ["upstream", "save"], "traces"
    if url is not None:
        refused += ["session_key", "base", "cluster", "layout"]
        what = "--url, whose server has judged the calls"
    for name in refused:
        if ctx.params[name] is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(Problem(option, f"has no meaning with {what}", "leave it out"))


def _running(url: str, session: str | None) -> Report:
    from prefillshare_server.lint.running import calls

    if session is None:
        raise ConfigError(Problem("--url", "no session is named", "add --session ID"))
    return Report.of_calls(calls(url, session), session)


def _traced(
    paths: Sequence[Path],
    session: str | None,
    session_key: str | None,
    base: str | None,
    cluster: Path | None,
    layout: LayoutName | None,
    exit_code: int | None = None,
) -> list[Report]:
    """`exit_code`: of the program that made the trace; one that failed may have sent nothing."""
    from prefillshare_server.lint import rendering, trace
    from prefillshare_server.lint.judge import Judge

    writer: rendering.Writer = rendering.Estimate()
    kind: str | None = None
    if base is not None or cluster is not None:
        writer, kind = rendering.exact(base, cluster)
    order: Layout = "model" if (layout or kind) == "model" else "context_first"
    with _progress() as bar:
        size = sum(path.stat().st_size for path in paths if path.is_file())
        reading = bar.add_task("read", total=size)
        index = trace.index(
            paths, session_key=session_key, progress=lambda count: bar.advance(reading, count)
        )
        if exit_code and not index.sessions:
            _tell("it made no chat request")
            return []
        chosen = _chosen(index, session, paths if exit_code is None else None)
        families = [
            family for family in index.families() if any(line.session in chosen for line in family)
        ]
        judging = bar.add_task("compare", total=sum(map(len, families)))
        found: dict[str | None, Report] = {}
        for family in families:
            judges: dict[str | None, Judge] = {}
            for line, call in zip(family, trace.load(family), strict=True):
                name = line.session
                if name not in judges:
                    parent = judges.get(line.parent) if line.parent else None
                    judges[name] = Judge(name, writer, order, parent)
                try:
                    judges[name].add(call.body, call.answer)
                except ValueError as error:
                    problem = Problem(line.where, str(error), "mend the request, or the template")
                    raise ConfigError(problem) from None
                bar.advance(judging)
            found |= {name: judge.report() for name, judge in judges.items()}
        reports = [found[name] for name in chosen]
    if index.skipped:
        _tell(f"{index.skipped} lines hold other requests than chat and were left out")
    return reports


def _chosen(index: Any, session: str | None, paths: Sequence[Path] | None) -> list[str | None]:
    """The sessions to look at. `paths`: the traces that were given; None for a program's.

    Raises ConfigError if there is none.
    """
    if not index.sessions and paths is not None:
        what = f"the {'file has' if len(paths) == 1 else 'files have'} no chat request"
        remedy = "record some, or name another file"
        raise ConfigError(Problem(", ".join(map(str, paths)), what, remedy))
    if not index.sessions:
        raise ConfigError(
            Problem(
                "the program",
                "made no chat request that was recorded",
                "one that gives its clients a base_url= passes the recorder by: leave it out "
                "there, so that OPENAI_BASE_URL counts",
            )
        )
    if session is None:
        return list(index.sessions)
    if session not in index.sessions:
        known = ", ".join(str(name) for name in list(index.sessions)[:8])
        raise ConfigError(
            Problem(f"--session {session}", "is not in the trace", f"it has: {known}")
        )
    return [session]


def _whole(reports: Sequence[Report]) -> Report:
    """All sessions as one report."""
    return Report(
        calls=sum(report.calls for report in reports),
        prompt_tokens=sum(report.prompt_tokens for report in reports),
        shared_tokens=sum(report.shared_tokens for report in reports),
        findings=tuple(finding for report in reports for finding in report.findings),
        fixed_tokens=round(sum(report.fixed_ratio * report.prompt_tokens for report in reports)),
        estimated=any(report.estimated for report in reports),
    )


def _sum(whole: Report) -> dict[str, Any]:
    names = ("calls", "prompt_tokens", "shared_tokens", "shared_ratio", "lost_tokens")
    fields = whole.to_dict()
    sums = {name: fields[name] for name in (*names, "fixed_ratio", "estimated")}
    return {**sums, "breaks": whole.breaks}


def _shown(reports: Sequence[Report], whole: Report) -> Iterator[RenderableType]:
    """Sessions with breaks in full, the others as a number."""
    from prefillshare_prefix import report_table

    broken = [report for report in reports if report.breaks]
    shown = broken if len(reports) > 1 else reports
    for report in shown:
        rows = report.rows
        if len(rows) > _SHOWN_ROWS:
            rows = tuple(row for row in rows if row.lost_tokens)[:_SHOWN_ROWS]
        yield replace(report, rows=rows)
    if len(reports) > 1:
        yield f"{len(reports)} sessions, {len(broken)} of them with breaks; all together:"
        yield report_table.summed(whole)


def _over(whole: Report, min_shared: float | None, max_breaks: int | None) -> list[str]:
    lines = []
    if min_shared is not None and whole.shared_ratio < min_shared:
        lines.append(f"shared {whole.shared_ratio:.1%}, wanted at least {min_shared:.1%}")
    if max_breaks is not None and whole.breaks > max_breaks:
        lines.append(f"breaks: {whole.breaks}, wanted at most {max_breaks}")
    return lines


def _shell_code(code: int) -> int:
    """A program's exit code as a shell gives it: 128 and the signal that ended it."""
    return 128 - code if code < 0 else code


def _tell(line: str, style: str = "dim") -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(line, style=style, markup=False)


@contextmanager
def _progress() -> Iterator[Progress]:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar
