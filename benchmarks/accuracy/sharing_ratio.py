"""Fig. 2 on a model of 0.8M parameters: accuracy over the share of KV that is the base's.

`python -m benchmarks.accuracy.sharing_ratio --help`
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.accuracy import arithmetic, plots, results
from benchmarks.accuracy.training import key, trained
from prefillshare_server.config import LayoutSettings
from prefillshare_training.data import Renderer
from prefillshare_training.evaluate.engine import Engine
from prefillshare_training.evaluate.models import Models
from prefillshare_training.evaluate.modes import By, Mode, Ratio
from prefillshare_training.settings import TrainSettings

NAME = "fig2_sharing_ratio"
RATIOS = {
    "prefix": tuple(tenths / 10 for tenths in range(11)),
    "layer": (0.0, 0.25, 0.5, 0.75, 1.0),
}

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

Curves = dict[str, list[float]]
"""Percent of exact answers at every ratio, by method."""


@dataclass(frozen=True)
class Plan:
    """How the models of one seed are made; the same for every seed and both methods."""

    base_steps: int
    steps: int
    batch_size: int = 64
    learning_rate: float = 2e-3
    max_grad_norm: float = 1.0
    base_rows: int = 20_000
    rows: int = 50_000
    held_out: int = 1_000


@app.command()
def main(
    seeds: Annotated[int, typer.Option(help="Seeds 0, 1, … so many.", min=1)] = 3,
    base_steps: Annotated[int, typer.Option(help="Steps of the base's training.", min=1)] = 500,
    steps: Annotated[int, typer.Option(help="Steps of each specialist's.", min=1)] = 2000,
    threads: Annotated[int, typer.Option(help="Of torch.", min=1)] = 1,
    work: Annotated[
        Path | None,
        typer.Option(help="Keeps the models, so that a second run only evaluates."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where the figures go.")] = results.FOLDER,
) -> None:
    """Train a base and two specialists per seed, and let each read ever more of the base's KV.

    The base learns to copy, sort and reverse six digits. [bold]full-ft[/bold] and
    [bold]prefillshare[/bold] learn three-digit addition from it, on the same rows in the
    same order, on their own KV and on the base's. Then the ratio of the
    prompt's KV that comes from the base goes from 0 to 1, by the first
    positions and by the first layers.

    A few minutes a model on one core.

    [dim]Examples:[/dim]

      python -m benchmarks.accuracy.sharing_ratio --seeds 3

      python -m benchmarks.accuracy.sharing_ratio --seeds 1 --base-steps 20
      --steps 20 --folder .
    """
    torch.set_num_threads(threads)
    console = Console(stderr=True)
    plan = Plan(base_steps, steps)
    work = work or results.work_folder(NAME)
    measured: dict[int, dict[str, Any]] = {}
    for seed in range(seeds):
        console.print(f"seed {seed}")
        measured[seed] = measure(seed, plan, work / key(asdict(plan)) / f"seed-{seed}", console)
    figures = figures_of(measured, plan) | {"command": results.command()}
    results.write(figures, folder / f"{NAME}.json")
    plots.sharing_ratio(figures, folder / f"{NAME}.png")
    _print(figures)


def figures_of(measured: Mapping[int, Mapping[str, Any]], plan: Plan) -> dict[str, Any]:
    """What the seeds gave, together: for every curve its mean, and each seed's own."""

    def together(by: str) -> dict[str, Any]:
        return {
            name: {
                "mean": [
                    round(mean(points), 2)
                    for points in zip(*(each[by][name] for each in measured.values()), strict=True)
                ],
                "seeds": {str(seed): each[by][name] for seed, each in measured.items()},
            }
            for name in ("own_full_ft", "naive", "prefillshare")
        }

    return {
        "seeds": list(measured),
        "ratios": list(RATIOS["prefix"]),
        **together("prefix"),
        "by_layer": {"ratios": list(RATIOS["layer"]), **together("layer")},
        "base": {str(seed): each["base"] for seed, each in measured.items()},
        "unit": "percent of held-out additions answered exactly",
        "n": plan.held_out,
        "settings": asdict(plan),
        "model": "Llama, 4 layers, hidden size 128, 0.8M parameters, float32",
    }


def measure(seed: int, plan: Plan, work: Path, console: Console) -> dict[str, Any]:
    """Train (or find) the three models of a seed and measure them."""
    chance = random.Random(seed)
    work.mkdir(parents=True, exist_ok=True)
    base_rows = arithmetic.moving(plan.base_rows + plan.held_out, chance)
    arithmetic.write_rows(base_rows[plan.held_out :], work / "base.jsonl")
    rows, held_out = arithmetic.additions(plan.rows, plan.held_out, chance)
    arithmetic.write_rows(rows, work / "addition.jsonl")
    arithmetic.write_model(work / "random", seed)

    def make(name: str, start: str, data: str, method: str, steps: int) -> Path:
        console.print(f"  {name}")
        settings = TrainSettings.model_validate(
            {
                "base": str(work / start),
                "data": str(work / data),
                "out": work / name,
                "method": method,
                "learning_rate": plan.learning_rate,
                "max_grad_norm": plan.max_grad_norm,
                "max_steps": steps,
                "batch_size": plan.batch_size,
                "accumulation": 1,
                "seed": seed,
                "save_steps": steps,
                "logging_steps": 100,
            }
        )
        return trained(settings, console)

    base = make("base", "random", "base.jsonl", "full-ft", plan.base_steps)
    full_ft = make("full-ft", "base", "addition.jsonl", "full-ft", plan.steps)
    shared = make("prefillshare", "base", "addition.jsonl", "prefillshare", plan.steps)

    renderer = Renderer.for_base(base, LayoutSettings())
    alone = Models.load(base, None, dtype="float32")
    models = {
        name: Models.load(base, decoder, dtype="float32")
        for name, decoder in (("naive", full_ft), ("prefillshare", shared))
    }
    own = _accuracy(models["naive"], "own", held_out, renderer)
    found: dict[str, Any] = {
        "base": {
            "its_own_tasks": _accuracy(alone, "own", base_rows[: plan.held_out], renderer),
            "addition": _accuracy(alone, "own", held_out, renderer),
        }
    }
    by: By
    for by in ("prefix", "layer"):
        found[by] = {"own_full_ft": [own] * len(RATIOS[by])} | {
            name: [_accuracy(pair, Ratio(ratio, by), held_out, renderer) for ratio in RATIOS[by]]
            for name, pair in models.items()
        }
    return found


def _accuracy(
    models: Models, mode: Mode, rows: Sequence[arithmetic.Row], renderer: Renderer
) -> float:
    """Percent of `rows` whose greedy answer is the completion, token for token."""
    turns = [renderer.text(row["prompt"], row["completion"]).turns[0] for row in rows]
    answers = Engine.on(models, mode=mode, batch_size=256).generate(
        [turn.prompt_ids for turn in turns],
        max_tokens=arithmetic.ANSWER_TOKENS,
        stop_ids=renderer.stop_ids,
    )
    right = sum(a.ids == turn.completion_ids for a, turn in zip(answers, turns, strict=True))
    return round(100 * right / len(rows), 2)


def _print(figures: Mapping[str, Any]) -> None:
    table = Table("base KV", *(f"{ratio:.0%}" for ratio in figures["ratios"]))
    for name in ("own_full_ft", "naive", "prefillshare"):
        table.add_row(name, *(f"{value:.1f}" for value in figures[name]["mean"]))
    Console().print(table)


if __name__ == "__main__":
    results.run(app)
