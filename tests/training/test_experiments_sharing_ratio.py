"""The experiment of Fig. 2: its wiring, on models that have learned nothing; and what it gave."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.accuracy import results, sharing_ratio
from prefillshare_server.models.provenance import Provenance

PLAN = sharing_ratio.Plan(
    base_steps=1, steps=1, batch_size=8, base_rows=16, rows=16, held_out=8, learning_rate=0.05
)
LINES = ("own_full_ft", "naive", "prefillshare")


def test_a_seed_is_trained_once_and_measured_at_every_ratio(tmp_path: Path) -> None:
    console = Console(quiet=True)
    first = sharing_ratio.measure(5, PLAN, tmp_path, console)
    models = [tmp_path / name for name in ("base", "full-ft", "prefillshare")]
    before = [(model / "model.safetensors").stat().st_mtime_ns for model in models]
    methods = [found.method for model in models if (found := Provenance.read(model))]
    assert methods == ["full-ft", "full-ft", "prefillshare"]

    again = sharing_ratio.measure(5, PLAN, tmp_path, console)

    assert [(model / "model.safetensors").stat().st_mtime_ns for model in models] == before
    assert again == first
    for by, ratios in sharing_ratio.RATIOS.items():
        assert {name: len(first[by][name]) for name in LINES} == dict.fromkeys(LINES, len(ratios))


def test_figures_have_each_seeds_values_and_their_mean() -> None:
    measured = {}
    for seed, accuracy in ((0, 90.0), (1, 100.0)):
        curves = {
            by: {name: [accuracy] * len(ratios) for name in LINES}
            for by, ratios in sharing_ratio.RATIOS.items()
        }
        measured[seed] = {**curves, "base": {}}
    figures = sharing_ratio.figures_of(measured, PLAN)
    assert figures["seeds"] == [0, 1]
    assert figures["naive"]["seeds"] == {"0": [90.0] * 11, "1": [100.0] * 11}
    assert figures["naive"]["mean"] == [95.0] * 11


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_the_kept_figure_shows_that_training_is_what_makes_sharing_work(seed: str) -> None:
    figures = json.loads((results.FOLDER / f"{sharing_ratio.NAME}.json").read_text())
    assert figures["ratios"][-1] == 1
    own, naive, shared = (figures[name]["seeds"][seed][-1] for name in LINES)
    assert shared >= own - 2
    assert naive <= own - 20
