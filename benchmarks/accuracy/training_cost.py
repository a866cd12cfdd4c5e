"""What cache-conditioned fine-tuning costs against the ordinary kind: tokens per second, memory.

`python -m benchmarks.accuracy.training_cost --help`
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.accuracy import plots, results
from benchmarks.accuracy.training_cost_run import Cost, Job

NAME = "training_cost"
METHODS = ("full-ft", "prefillshare")
SHAPES = {"prompt_heavy": (900, 100), "completion_heavy": (100, 900)}
"""Tokens of a prompt and of its answer."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


class Case(NamedTuple):
    """Between two methods only the method differs."""

    shape: str
    lora: bool


CASES = [Case(shape, lora) for lora in (False, True) for shape in SHAPES]
Costs = dict[Case, dict[str, list[Cost]]]
"""By method, one for each repeat."""


@app.command()
def main(
    base: Annotated[str, typer.Option(help="The model.")] = "smollm2-135m-instruct",
    repeats: Annotated[int, typer.Option(help="Times each side is measured.", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Timed optimizer steps of each.", min=1)] = 2,
    accumulation: Annotated[int, typer.Option(help="Samples in a step.", min=1)] = 2,
    bf16: Annotated[bool, typer.Option(help="Compute in bfloat16, or in float32.")] = True,
    threads: Annotated[int, typer.Option(help="Of torch.", min=1)] = os.cpu_count() or 1,
    folder: Annotated[Path, typer.Option(help="Where the figures go.")] = results.FOLDER,
) -> None:
    """Measure prefillshare against full-ft, with all weights and with LoRA.

    Random tokens; 900 of prompt and 100 of answer, and the other way round.
    Every measurement is a process of its own, and the two methods take turns,
    so that both meet the same machine. A ratio is prefillshare / full-ft: the
    median over the repeats of what the pairs gave.

    [dim]Examples:[/dim]

      python -m benchmarks.accuracy.training_cost

      python -m benchmarks.accuracy.training_cost --base tiny-base --repeats 1
    """
    costs = _measure(base, repeats, steps, accumulation, bf16, threads)
    figures = figures_of(costs) | {
        "command": results.command(),
        "model": base,
        "dtype": "bfloat16" if bf16 else "float32",
        "batch_size": 1,
        "accumulation": accumulation,
        "timed_steps": steps,
        "threads": threads,
        "tokens": {
            shape: dict(zip(("prompt", "completion"), SHAPES[shape], strict=True))
            for shape in SHAPES
        },
    }
    results.write(figures, folder / f"{NAME}.json")
    plots.training_cost(figures, folder / f"{NAME}.png")
    _print(figures)


def figures_of(costs: Mapping[Case, Mapping[str, Sequence[Cost]]]) -> dict[str, Any]:
    """The ratios that are asked for, and every measurement behind them."""
    full, lora = ({shape: costs[Case(shape, lora)] for shape in SHAPES} for lora in (False, True))
    worst = {
        name: max(_ratio(sides, "peak_memory_bytes") for sides in shapes.values())
        for name, shapes in (("full", full), ("lora", lora))
    }
    return {
        "tokens_per_s_ratio_prompt_heavy": _ratio(full["prompt_heavy"], "tokens_per_s"),
        "tokens_per_s_ratio_completion_heavy": _ratio(full["completion_heavy"], "tokens_per_s"),
        "tokens_per_s_ratio_prompt_heavy_lora": _ratio(lora["prompt_heavy"], "tokens_per_s"),
        "tokens_per_s_ratio_completion_heavy_lora": _ratio(
            lora["completion_heavy"], "tokens_per_s"
        ),
        "peak_memory_ratio_full": worst["full"],
        "peak_memory_ratio_lora": worst["lora"],
        "ratios": "prefillshare / full-ft; memory: the larger of both shapes",
        "cases": [
            {
                "shape": case.shape,
                "lora": case.lora,
                "tokens_per_s_ratio": _ratio(sides, "tokens_per_s"),
                "tokens_per_cpu_s_ratio": _ratio(sides, "tokens_per_cpu_s"),
                "peak_memory_ratio": _ratio(sides, "peak_memory_bytes"),
                **{method: [asdict(cost) for cost in sides[method]] for method in METHODS},
            }
            for case, sides in costs.items()
        ],
    }


def _measure(
    base: str, repeats: int, steps: int, accumulation: int, bf16: bool, threads: int
) -> Costs:
    costs: Costs = {case: {method: [] for method in METHODS} for case in CASES}
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with progress:
        task = progress.add_task("", total=repeats * len(CASES) * len(METHODS))
        for repeat, case in itertools.product(range(repeats), CASES):
            # Who goes first changes, for the machine may get slower or faster meanwhile.
            for method in METHODS if repeat % 2 == 0 else METHODS[::-1]:
                kind = " LoRA" if case.lora else ""
                progress.update(task, description=f"{method}{kind}, {case.shape}")
                prompt, completion = SHAPES[case.shape]
                job = Job(
                    base=base,
                    method=method,
                    lora=case.lora,
                    prompt=prompt,
                    completion=completion,
                    steps=steps,
                    accumulation=accumulation,
                    bf16=bf16,
                    threads=threads,
                )
                costs[case][method].append(_apart(job))
                progress.advance(task)
    return costs


def _apart(job: Job) -> Cost:
    """`job` in a process of its own. Raises CalledProcessError, its output is on our stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.accuracy.training_cost_run", json.dumps(asdict(job))],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(job.threads)},
    )
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def _ratio(sides: Mapping[str, Sequence[Cost]], field: str) -> float:
    pairs = zip(sides["prefillshare"], sides["full-ft"], strict=True)
    ratios = [float(getattr(a, field) / getattr(b, field)) for a, b in pairs]
    return round(statistics.median(ratios), 3)


def _print(figures: Mapping[str, Any]) -> None:
    table = Table("", "tokens/s", "tokens/CPU s", "peak memory", title="prefillshare / full-ft")
    for case in figures["cases"]:
        name = f"{case['shape'].replace('_', '-')}{', LoRA' if case['lora'] else ''}"
        keys = ("tokens_per_s_ratio", "tokens_per_cpu_s_ratio", "peak_memory_ratio")
        table.add_row(name, *(f"{case[key]:.2f}" for key in keys))
    Console().print(table)


if __name__ == "__main__":
    results.run(app)
