"""Rebuilds the specialists: rows, training, and their held-out success beside the base's.

    python -m examples.specialists.build                    # all four
    python -m examples.specialists.build --role planner     # one of them

The adapters and `results.json` are replaced role by role, each when it is measured.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from examples.react.roles import ROLES
from examples.specialists.generate import Row, held_out, rows, write
from examples.specialists.live import MAX_TOKENS
from examples.specialists.score import correct
from prefillshare_server.config import Cluster
from prefillshare_server.models import store
from prefillshare_server.models.provenance import Provenance
from prefillshare_training.data import Renderer
from prefillshare_training.evaluate.engine import Engine
from prefillshare_training.evaluate.score import accuracy
from prefillshare_training.settings import LoraSettings, TrainSettings
from prefillshare_training.train import Interrupted, train

HERE = Path(__file__).resolve().parent
CLUSTER = HERE.parent / "react" / "cluster.yaml"
RESULTS = HERE / "results.json"

LORA = LoraSettings(rank=8, alpha=16)
BATCH = 4
SEED = 0


@dataclass(frozen=True)
class Recipe:
    """What differs between the roles' trainings."""

    steps: int
    learning_rate: float = 1.5e-3


RECIPES = {
    "planner": Recipe(steps=100),
    "toolcaller": Recipe(steps=130),
    "solver": Recipe(steps=100),
    "critic": Recipe(steps=120),
}


def main(
    role: Annotated[
        list[str] | None, typer.Option(help="Only this role; may be given several times.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps instead of the recipe's.")
    ] = None,
) -> None:
    """Train the roles' adapters, measure them, and write both beside this file."""
    if unknown := sorted(set(role or ()) - {*ROLES}):
        raise typer.BadParameter(f"{', '.join(unknown)} is no role; choose from {', '.join(ROLES)}")
    console = Console(stderr=True, highlight=False)
    # Train as served: the same base, the same layout.
    cluster = Cluster.load(CLUSTER)
    for name in role or ROLES:
        recipe = RECIPES[name]
        console.print(f"[bold]{name}[/]")
        try:
            build(name, replace(recipe, steps=steps or recipe.steps), cluster, console)
        except Interrupted:
            console.print(f"stopped; the {name} in this folder is as it was")
            raise typer.Exit(130) from None


def build(role: str, recipe: Recipe, cluster: Cluster, console: Console) -> None:
    """Train one role's adapter and record what it can do."""
    out = HERE / role
    with tempfile.TemporaryDirectory(prefix=f"{role}-") as work:
        data = Path(work) / f"{role}.jsonl"
        write(data, rows(role, "train", recipe.steps * BATCH, seed=SEED))
        settings = TrainSettings(
            base=cluster.base.model,
            data=str(data),
            out=Path(work) / role,
            lora=LORA,
            learning_rate=recipe.learning_rate,
            batch_size=BATCH,
            accumulation=1,
            max_grad_norm=1.0,
            weight_decay=0.0,
            bf16=True,
            seed=SEED,
            layout=cluster.layout,
        )
        made = train(settings, console).out
        base_dir = store.resolve(cluster.base.model)
        renderer = Renderer.for_base(base_dir, cluster.layout)
        found = evaluation(role, held_out(role, seed=SEED), renderer, base_dir, made)
        console.print(f"held out: {json.dumps(found)}")
        _keep(made, out, found)
    _record(role, found)


def evaluation(
    role: str, items: Sequence[Row], renderer: Renderer, base_dir: Path, adapter: Path
) -> dict[str, Any]:
    """Success on `items` in percent, of the adapter and of the base, both on the base's KV."""
    measured: dict[str, Any] = {"task": f"{role}, held out", "mode": "shared", "n": len(items)}
    for name, decoder in (("base", None), ("specialist", adapter)):
        engine = Engine(base_dir, decoder, mode="shared")
        answers = engine.generate(
            [renderer.prompt(row.prompt, row.tools or None) for row in items],
            max_tokens=MAX_TOKENS,
            stop_ids=renderer.stop_ids,
        )
        scores = [
            float(correct(role, renderer.decode(answer.ids), row.answer))
            for row, answer in zip(items, answers, strict=True)
        ]
        percent, low, high = accuracy(scores)
        measured[name] = round(percent, 1)
        measured[f"{name}_ci95"] = [round(low, 1), round(high, 1)]
    return measured


def _keep(made: Path, out: Path, found: dict[str, Any]) -> None:
    """Move the adapter to its place, with what it can do and without this machine's paths."""
    record = Provenance.read(made)
    assert record is not None, "the trainer writes one"
    source = (
        f"python -m examples.specialists.generate --number {record.data['samples']} --seed {SEED}"
    )
    replace(record, data={**record.data, "source": source}, evaluation=(found,)).write(made)
    beside = out.with_name(f".{out.name}.partial")
    shutil.copytree(made, beside)
    shutil.rmtree(out, ignore_errors=True)
    beside.rename(out)


def _record(role: str, found: dict[str, Any]) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[role] = {name: value for name, value in found.items() if name != "task"}
    ordered = {name: results[name] for name in ROLES if name in results}
    RESULTS.write_text(json.dumps(ordered, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
