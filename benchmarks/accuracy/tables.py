"""Tables 1 and 13 on a small model: what each way of training answers, and on whose KV.

`python -m benchmarks.accuracy.tables --help`
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.accuracy import plots, results
from benchmarks.accuracy.subjects import SUBJECTS, Data
from benchmarks.accuracy.training import key, trained
from prefillshare_server.errors import ConfigError, Problem, suggestion
from prefillshare_server.models.provenance import Provenance
from prefillshare_training.evaluate.run import EvalSettings, evaluate
from prefillshare_training.settings import TrainSettings

NAME = "accuracy"
ABOUT = "about"
"""Key of what the figures are about, beside those of the tasks."""


class Method(NamedTuple):
    """A row of the tables."""

    label: str
    training: str | None
    """The trainer's method; None is the base as it is."""
    lora: bool
    mode: str
    """Whose KV of the prompt it reads when it is evaluated."""


METHODS = {
    "base": Method("base", None, False, "own"),
    "prefillshare": Method("PrefillShare, the base's KV", "prefillshare", False, "shared"),
    "full-ft": Method("Full-FT, its own KV", "full-ft", False, "own"),
    "naive": Method("Full-FT, the base's KV (naive)", "full-ft", False, "shared"),
    "prefillshare-lora": Method("PrefillShare LoRA, the base's KV", "prefillshare", True, "shared"),
    "full-ft-lora": Method("Full-FT LoRA, its own KV", "full-ft", True, "own"),
    "naive-lora": Method("Full-FT LoRA, the base's KV (naive)", "full-ft", True, "shared"),
}


COMMON = {"packing": True, "max_grad_norm": 1.0, "bf16": True, "save_steps": 50}
"""Settings of every training."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def main(
    subject: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(SUBJECTS)}; may be repeated.", show_default="all"),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(METHODS)}; may be repeated.", show_default="all"),
    ] = None,
    base: Annotated[str, typer.Option(help="The base.")] = "smollm2-135m-instruct",
    gsm8k: Annotated[
        Path, typer.Option(help="Folder with GSM8K's train.jsonl and test.jsonl.")
    ] = Path("../shared/data/gsm8k"),
    items: Annotated[int, typer.Option(help="Test items of each task, drawn.", min=1)] = 200,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of all weights.", show_default="the subject's")
    ] = None,
    lora_learning_rate: Annotated[
        float | None, typer.Option(help="Of LoRA.", show_default="the subject's")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(help="Fewer steps, to try it.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of training, and of the test items.")] = 0,
    threads: Annotated[int, typer.Option(help="Of torch.", min=1)] = os.cpu_count() or 1,
    work: Annotated[
        Path | None, typer.Option(help="Keeps models and answers, so that a run can go on.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where the figures go.")] = results.FOLDER,
) -> None:
    """Train specialists from one base in every way, and evaluate each on its own KV or the base's.

    [bold]tools[/bold]: trained on BFCL's live_simple and live_multiple without what is like
    a test item; tested on simple_python and multiple. [bold]math[/bold]: GSM8K.
    [bold]toolcaller[/bold],
    [bold]solver[/bold]: two roles of the ReAct example, on made-up rows.

    An hour or more on two cores. What is there already is not done again: after
    an interruption, give the same command. The figures are written after every
    evaluation.

    [dim]Examples:[/dim]

      python -m benchmarks.accuracy.tables

      python -m benchmarks.accuracy.tables --subject tools --method base
      --method prefillshare
    """
    torch.set_num_threads(threads)
    console = Console(stderr=True)
    work = work or results.work_folder(NAME)
    methods = _chosen(method, METHODS, "--method")
    path = folder / f"{NAME}.json"
    work.mkdir(parents=True, exist_ok=True)
    for name in _chosen(subject, SUBJECTS, "--subject"):
        chosen = SUBJECTS[name]
        data = chosen.data(work, gsm8k)
        rates = {
            False: learning_rate or chosen.learning_rate,
            True: lora_learning_rate or chosen.lora_learning_rate,
        }
        training = {**COMMON, **chosen.training, "base": base, "seed": seed}
        if max_steps is not None:
            training["max_steps"] = max_steps
        for label in methods:
            each = METHODS[label]
            decoder = None
            if each.training is not None:
                console.print(f"{name}: train {each.training}{' LoRA' if each.lora else ''}")
                decoder = _decoder(name, each, training, rates[each.lora], data, work, console)
            for column, measure in chosen.measures.items():
                console.print(f"{column}: {each.label}")
                settings = EvalSettings(
                    base=base,
                    decoder=str(decoder) if decoder else None,
                    task=measure.task,
                    match=measure.match,
                    layout=chosen.training.get("layout", {}),
                    data=str(data.test) if data.test else None,
                    mode=each.mode,
                    limit=items,
                    seed=seed,
                    max_tokens=measure.max_tokens,
                    out=work / "answers" / _file_name(column, label, decoder),
                )
                found = evaluate(settings, console)
                figures = _with(
                    results.read(path),
                    column,
                    label,
                    {
                        "n": found.n,
                        "accuracy": round(found.accuracy, 2),
                        "ci95": [round(bound, 2) for bound in found.ci95],
                        "cut": found.cut,
                    },
                )
                about = figures[ABOUT]
                about["model"] = base
                about["training"].setdefault(name, {})
                about["training"][name] |= {
                    **training,
                    "learning_rate": rates[False],
                    "lora_learning_rate": rates[True],
                    "data": data.about,
                    "command": results.command(),
                }
                if decoder and (record := Provenance.read(decoder)):
                    # What of the data is short enough.
                    about["training"][name]["samples"] = record.data["samples"]
                results.write(figures, path)
                plots.accuracy(figures, folder / f"{NAME}.png")
    _print(results.read(path))


def _with(
    figures: Mapping[str, Any], task: str, label: str, figure: Mapping[str, Any]
) -> dict[str, Any]:
    """`figures` and one more: by task and method, in the order that they have here."""
    found = {name: dict(methods) for name, methods in figures.items() if name != ABOUT}
    found.setdefault(task, {})[label] = dict(figure)
    about = {
        "unit": "percent of the items; ci95: Wilson score interval over the items",
        "methods": {label: each.label for label, each in METHODS.items()},
        "training": dict(figures.get(ABOUT, {}).get("training", {})),
    }
    ordered = {
        name: {label: found[name][label] for label in METHODS if label in found[name]}
        for subject in SUBJECTS.values()
        for name in subject.measures
        if name in found
    }
    return {**ordered, ABOUT: about}


def _decoder(
    subject: str,
    method: Method,
    training: Mapping[str, Any],
    learning_rate: float,
    data: Data,
    work: Path,
    console: Console,
) -> Path:
    given = {
        **training,
        "method": method.training,
        "lora": {} if method.lora else None,
        "learning_rate": learning_rate,
    }
    name = f"{subject}-{method.training}{'-lora' if method.lora else ''}-{key(given)}"
    settings = TrainSettings.model_validate({**given, "data": str(data.train), "out": work / name})
    return trained(settings, console)


def _file_name(task: str, label: str, decoder: Path | None) -> str:
    suffix = f"-{decoder.name.rpartition('-')[2]}" if decoder else ""
    return f"{task}-{label}{suffix}.jsonl"


def _chosen(given: list[str] | None, known: Collection[str], option: str) -> list[str]:
    """What was asked for, in the order that it has here. Raises ConfigError."""
    for name in given or ():
        if name not in known:
            raise ConfigError(
                Problem(f"{option} {name}", "there is no such one", suggestion(name, known))
            )
    return [name for name in known if not given or name in given]


def _print(figures: Mapping[str, Any]) -> None:
    about, tasks = figures[ABOUT], [name for name in figures if name != ABOUT]
    table = Table("", *tasks, title=about["model"])
    for label, shown in about["methods"].items():
        cells = [figures[name].get(label) for name in tasks]
        if any(cells):
            table.add_row(shown, *(f"{cell['accuracy']:.1f}" if cell else "" for cell in cells))
    Console().print(table)


if __name__ == "__main__":
    results.run(app)
