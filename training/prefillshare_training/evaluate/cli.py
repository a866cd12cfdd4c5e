"""``prefillshare eval``: a decoder and a benchmark in, an accuracy out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from prefillshare_training.evaluate.result import EvalResult

INTERRUPTED = 130

_WHO = "Who answers"
_WHAT = "What is asked"
_RUN = "The run"


def evaluate(
    base: Annotated[
        str,
        typer.Option(
            help="The base: store name, directory or hub id. Prompts are in its tokens.",
            rich_help_panel=_WHO,
        ),
    ],
    task: Annotated[
        str,
        typer.Option(
            help="gsm8k, humaneval, bfcl-simple-python, bfcl-multiple, or exact: your own file.",
            rich_help_panel=_WHAT,
        ),
    ],
    decoder: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint or adapter to evaluate; without it, the base itself.",
            rich_help_panel=_WHO,
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="Whose KV of the prompt the decoder reads: [bold]shared[/bold] (the base's, as "
            "served), [bold]own[/bold] (as in ordinary generation), or a share of it such as 0.25 "
            "or 0.25:layer.",
            rich_help_panel=_WHO,
        ),
    ] = "shared",
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask a running server instead of generating in this process.",
            rich_help_panel=_WHO,
        ),
    ] = None,
    role: Annotated[
        str | None, typer.Option(help="The server's role to ask.", rich_help_panel=_WHO)
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Calls to the server at a time.", rich_help_panel=_WHO)
    ] = 8,
    data: Annotated[
        str | None,
        typer.Option(
            help="exact: JSON lines with messages or prompt, and answer or completion. "
            "gsm8k: its test file, instead of the hub's.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    match: Annotated[
        str | None,
        typer.Option(
            help="For exact: exact (the default), contains, number, or json, also of tool calls.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Use so many items, drawn with --seed.", rich_help_panel=_WHAT),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the items drawn.", rich_help_panel=_WHAT)] = 0,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Longest answer; by default the task's.", rich_help_panel=_WHAT),
    ] = None,
    tail_role: Annotated[
        str, typer.Option(help="layout.tail_role of the cluster.", rich_help_panel=_WHAT)
    ] = "system",
    shared_head: Annotated[
        str | None, typer.Option(help="layout.shared_head of the cluster.", rich_help_panel=_WHAT)
    ] = None,
    layout_kind: Annotated[
        str,
        typer.Option(
            "--layout",
            help="layout.kind of the cluster: context-first or model.",
            rich_help_panel=_WHAT,
        ),
    ] = "context-first",
    out: Annotated[
        Path | None,
        typer.Option(
            help="File for the answers, JSON lines; the result is beside it. By default under "
            "./evaluations. Answers that are there already are kept.",
            rich_help_panel=_RUN,
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start that file anew.", rich_help_panel=_RUN)
    ] = False,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Write the result into the decoder's prefillshare.json.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=_RUN)
    ] = False,
    batch_size: Annotated[
        int, typer.Option(help="Prompts answered together.", rich_help_panel=_RUN)
    ] = 16,
    dtype: Annotated[
        str, typer.Option(help="auto (the base's) or float32.", rich_help_panel=_RUN)
    ] = "auto",
) -> None:
    """Measure how often a decoder is right, in the way it will be served.

    Answers are greedy. In mode shared the base computes the KV of the prompt
    and the decoder goes on from the last prompt token, exactly as [bold]prefillshare
    serve[/bold] does. Compare with --mode own, and with the decoder before training.
    Ctrl-C keeps what is answered; the same command goes on. humaneval runs what
    the model writes, in a sandbox (Linux).

    [dim]Examples:[/dim]

      prefillshare eval --base smollm2-135m-instruct --decoder ./toolcaller
      --task bfcl-simple-python --limit 100

      prefillshare eval --base smollm2-135m-instruct --decoder ./solver
      --task exact --data test.jsonl --match number --record

      prefillshare eval --base smollm2-135m-instruct --task gsm8k
      --data test.jsonl --server http://127.0.0.1:8000 --role solver
    """
    options = dict(locals())
    from prefillshare_training.evaluate.settings import EvalSettings
    from prefillshare_training.options import settings_from

    settings = settings_from(EvalSettings, options, command="eval")
    from prefillshare_training.evaluate.run import evaluate as run

    try:
        result = run(settings, Console(stderr=True))
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
        return
    _show(result)


def _show(result: EvalResult) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("task", f"{result.task}, {result.n} items")
    table.add_row("mode", result.mode)
    for name, each in result.metrics.items():
        interval = f"[dim](95 %: {each.low:.1f} to {each.high:.1f})[/dim]"
        table.add_row(name, f"{each.percent:.1f} %  {interval}")
    if result.cut:
        table.add_row("cut off", f"{result.cut} answers reached --max-tokens")
    if result.no_room:
        table.add_row("no room", f"{result.no_room} prompts fill the context and count as wrong")
    table.add_row("answers", str(result.items_path))
    Console(file=sys.stdout).print(table)
