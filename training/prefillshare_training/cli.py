"""``prefillshare train``: options in, a decoder out. Torch is loaded when the command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from prefillshare_server.errors import ConfigError, Problem

if TYPE_CHECKING:
    from prefillshare_training.settings import TrainSettings
    from prefillshare_training.train import TrainResult

INTERRUPTED = 130

_DATA = "What to train on"
_WHAT = "What is trained"
_HOW = "Hyper-parameters (defaults: the paper's, appendix A.1)"
_RUN = "The run"


def train(
    base: Annotated[str, typer.Option(help="The frozen base: store name, directory or hub id.")],
    data: Annotated[
        str,
        typer.Option(
            help="JSON lines with [bold]messages[/bold] (and tools) or "
            "[bold]prompt[/bold] and [bold]completion[/bold]; with --preset also a folder or a "
            "hub id.",
            rich_help_panel=_DATA,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the decoder. Checkpoints and logs go to OUT.run beside it.",
            show_default=False,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Read a known data set: metamathqa, deepmath, evol-instruct-code, xlam, gsm8k.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Use so many samples, drawn with --seed.", rich_help_panel=_DATA),
    ] = None,
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad", help="Leave out rows with mistakes and count them.", rich_help_panel=_DATA
        ),
    ] = False,
    max_length: Annotated[
        int, typer.Option(help="Longest sample in tokens.", rich_help_panel=_DATA)
    ] = 1024,
    validation: Annotated[
        float,
        typer.Option(help="Share kept for a validation loss.", rich_help_panel=_DATA),
    ] = 0.0,
    tail_role: Annotated[
        str,
        typer.Option(
            help="layout.tail_role of the cluster that will serve it.", rich_help_panel=_DATA
        ),
    ] = "system",
    shared_head: Annotated[
        str | None,
        typer.Option(
            help="layout.shared_head of the cluster that will serve it.", rich_help_panel=_DATA
        ),
    ] = None,
    layout_kind: Annotated[
        str,
        typer.Option(
            "--layout",
            help="layout.kind of the cluster: context-first or model.",
            rich_help_panel=_DATA,
        ),
    ] = "context-first",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show three samples, who computes what and what is learnt, and stop.",
            rich_help_panel=_DATA,
        ),
    ] = False,
    method: Annotated[
        str,
        typer.Option(
            help="prefillshare, or full-ft: ordinary fine-tuning, for comparison.",
            rich_help_panel=_WHAT,
        ),
    ] = "prefillshare",
    lora: Annotated[
        bool,
        typer.Option(
            "--lora", help="Train an adapter instead of all weights.", rich_help_panel=_WHAT
        ),
    ] = False,
    lora_rank: Annotated[
        int | None,
        typer.Option(help="Rank of the adapter (128); implies --lora.", rich_help_panel=_WHAT),
    ] = None,
    lora_alpha: Annotated[
        float | None,
        typer.Option(help="Its scale (twice the rank); implies --lora.", rich_help_panel=_WHAT),
    ] = None,
    lora_targets: Annotated[
        str | None,
        typer.Option(
            help="Its linear layers (q_proj,o_proj,gate_proj,up_proj,down_proj); implies --lora.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    learning_rate: Annotated[
        float,
        typer.Option(
            "--learning-rate", "--lr", help="The highest one, after warm-up.", rich_help_panel=_HOW
        ),
    ] = 2e-5,
    learning_rate_grid: Annotated[
        str | None,
        typer.Option(
            help="Try several, keep the best: numbers with commas, or [bold]paper[/bold] for "
            "1e-4,1e-5,2e-5,5e-5,2e-6,5e-6.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    scheduler: Annotated[
        str,
        typer.Option(help="cosine, linear or constant_with_warmup.", rich_help_panel=_HOW),
    ] = "cosine",
    warmup_ratio: Annotated[
        float,
        typer.Option(help="Share of the steps in which the rate rises.", rich_help_panel=_HOW),
    ] = 0.03,
    weight_decay: Annotated[float, typer.Option(help="AdamW's.", rich_help_panel=_HOW)] = 0.1,
    max_grad_norm: Annotated[
        float, typer.Option(help="0 clips nothing.", rich_help_panel=_HOW)
    ] = 0.0,
    epochs: Annotated[
        float, typer.Option(help="How often each sample is used.", rich_help_panel=_HOW)
    ] = 1.0,
    max_steps: Annotated[
        int | None, typer.Option(help="Optimizer steps, instead of epochs.", rich_help_panel=_HOW)
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Rows per forward pass.", rich_help_panel=_HOW)
    ] = 1,
    accumulation: Annotated[
        int, typer.Option(help="Forward passes per optimizer step.", rich_help_panel=_HOW)
    ] = 16,
    packing: Annotated[
        bool,
        typer.Option("--packing", help="Fill rows with several samples.", rich_help_panel=_HOW),
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Of the samples drawn and their order.", rich_help_panel=_HOW)
    ] = 0,
    bf16: Annotated[
        bool, typer.Option("--bf16", help="Compute in bfloat16.", rich_help_panel=_RUN)
    ] = False,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing", help="Less memory, more time.", rich_help_panel=_RUN
        ),
    ] = False,
    save_steps: Annotated[
        int, typer.Option(help="Steps between checkpoints.", rich_help_panel=_RUN)
    ] = 200,
    logging_steps: Annotated[
        int, typer.Option(help="Steps between log entries.", rich_help_panel=_RUN)
    ] = 10,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from the last complete checkpoint.", rich_help_panel=_RUN
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace OUT and an unfinished run.", rich_help_panel=_RUN
        ),
    ] = False,
) -> None:
    """Fine-tune a specialist that generates from the frozen base's KV cache.

    The base computes the KV of every prompt and is never changed; the decoder
    learns to answer from it (cache-conditioned fine-tuning). Prompts are
    rendered as [bold]prefillshare serve[/bold] renders them. The result is an ordinary
    checkpoint, or with --lora an adapter, for a role of a cluster file.

    [dim]Examples:[/dim]

      prefillshare train --base smollm2-135m-instruct --data calls.jsonl --dry-run

      prefillshare train --base smollm2-135m-instruct --data calls.jsonl
      --out ./toolcaller

      prefillshare train --base Qwen/Qwen3-1.7B --preset gsm8k --data openai/gsm8k
      --lora --lr 1e-4 --bf16 --out ./solver

      [dim]on several GPUs[/dim]
      accelerate launch --num_processes 8 -m prefillshare_training …
    """
    options = dict(locals())
    settings = settings_of(options)
    if dry_run:
        _preview(settings)
        return
    if out is None:
        raise ConfigError(Problem("--out", "is missing", "name a folder for the decoder"))
    from prefillshare_training.run_state import begun
    from prefillshare_training.train import Interrupted, is_main
    from prefillshare_training.train import train as run

    try:
        result = run(settings)
    except Interrupted as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(INTERRUPTED) from None
    except KeyboardInterrupt:
        hint = "; --resume goes on from the last checkpoint" if begun(settings) else ""
        typer.echo(f"stopped{hint}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if is_main():
        _report(result, settings)


def settings_of(options: dict[str, Any]) -> TrainSettings:
    """Options as settings. Raises ConfigError that names each option that is wrong."""
    from prefillshare_training.options import settings_from
    from prefillshare_training.settings import PAPER_LEARNING_RATES, TrainSettings

    lora = {
        "rank": options["lora_rank"],
        "alpha": options["lora_alpha"],
        "targets": options["lora_targets"] and _listed(options["lora_targets"]),
    }
    lora = {key: value for key, value in lora.items() if value is not None}
    if "rank" in lora:
        lora.setdefault("alpha", 2 * lora["rank"])
    grid = options["learning_rate_grid"]
    return settings_from(
        TrainSettings,
        options,
        command="train",
        out=options["out"] or Path("out"),
        lora=lora if lora or options["lora"] else None,
        learning_rate_grid=(
            PAPER_LEARNING_RATES if grid == "paper" else _listed(grid) if grid else ()
        ),
    )


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _preview(settings: TrainSettings) -> None:
    from prefillshare_server.models import store
    from prefillshare_training import data
    from prefillshare_training.train import load_data

    dataset, renderer = load_data(settings, store.resolve(settings.base), Console(stderr=True))
    data.preview(dataset.samples, renderer, Console(), seed=settings.seed)


def _report(result: TrainResult, settings: TrainSettings) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("decoder", str(result.out))
    table.add_row("steps", str(result.steps))
    table.add_row("training loss", f"{result.loss:.4f}")
    if result.validation_loss is not None:
        table.add_row("validation loss", f"{result.validation_loss:.4f}")
    table.add_row("speed", f"{result.tokens_per_s:.0f} tokens/s")
    table.add_row("peak memory", f"{result.peak_memory_bytes / 1e9:.2f} GB")
    console = Console(file=sys.stdout)
    console.print(table)
    if settings.method == "prefillshare":
        key = "adapter" if settings.lora else "model"
        line = f"in a cluster file: roles: {{my-role: {{{key}: {result.out}}}}}"
        console.print(line, markup=False, soft_wrap=True)
