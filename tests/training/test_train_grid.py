"""A search over learning rates: one run each, the best is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefillshare_server.errors import ConfigError
from prefillshare_server.models.provenance import Provenance
from prefillshare_training import train as module
from prefillshare_training.settings import TrainSettings
from prefillshare_training.train import Diverged, Interrupted, TrainResult, train
from tests.training.runs import QUIET, require_equal, settings, stop_after


def grid(base_dir: Path, folder: Path, *rates: float, **options: Any) -> TrainSettings:
    """Runs of 6 steps each."""
    return settings(base_dir, folder, learning_rate_grid=rates, validation=0.25, **options)


def test_of_a_learning_rate_grid_the_best_is_kept(base_dir: Path, tmp_path: Path) -> None:
    run = grid(base_dir, tmp_path, 1e-9, 5e-3, 1e-8, epochs=2)
    result = train(run, QUIET)
    assert result.learning_rate == 5e-3
    record = Provenance.read(run.out)
    assert record is not None
    assert record.hyperparameters["learning_rate"] == 5e-3
    assert result.out == run.out
    assert not list(run.run_dir.glob("lr-*/model.safetensors"))


def test_an_output_in_the_way_is_said_before_the_first_run(base_dir: Path, tmp_path: Path) -> None:
    run = grid(base_dir, tmp_path, 1e-9, 5e-3)
    run.out.mkdir()
    (run.out / "mine").touch()
    with pytest.raises(ConfigError, match="not empty"):
        train(run, QUIET)
    assert not run.run_dir.exists()


def test_a_rate_that_diverges_is_not_the_best(base_dir: Path, tmp_path: Path) -> None:
    result = train(grid(base_dir, tmp_path, 1e30, 1e-3), QUIET)
    assert result.learning_rate == 1e-3
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_when_every_rate_diverges_nothing_is_written(base_dir: Path, tmp_path: Path) -> None:
    run = grid(base_dir, tmp_path, 1e30, 1e35)
    with pytest.raises(Diverged, match=r"1e\+35"):
        train(run, QUIET)
    assert not run.out.exists()


def test_a_validation_loss_that_is_no_number_is_the_worst() -> None:
    first, second = (
        TrainResult(Path(), 1, 1.0, loss, 1, 1.0, 1, 1.0) for loss in (float("nan"), 9.0)
    )
    assert min((first, second), key=module._finite_validation_loss) is second


def test_a_stopped_search_goes_on_with_the_run_that_was_stopped(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = grid(base_dir, tmp_path, 1e-9, 5e-3, 1e-8, out=tmp_path / "undisturbed")
    train(undisturbed, QUIET)
    run = grid(base_dir, tmp_path, 1e-9, 5e-3, 1e-8)
    train_one = module._run
    begun: list[float] = []

    def noted(one: TrainSettings, *others: Any) -> TrainResult:
        begun.append(one.learning_rate)
        if len(begun) == 2:
            stop_after(monkeypatch, 4)
        try:
            return train_one(one, *others)
        finally:
            monkeypatch.undo()
            monkeypatch.setattr(module, "_run", noted)

    monkeypatch.setattr(module, "_run", noted)
    with pytest.raises(Interrupted, match="after step 4 of 6"):
        train(run, QUIET)
    with pytest.raises(ConfigError, match="unfinished run"):
        train(run, QUIET)
    result = train(run.model_copy(update={"resume": True}), QUIET)
    assert begun == [1e-9, 5e-3, 5e-3, 1e-8]
    assert result.learning_rate == 5e-3
    require_equal(run.out, undisturbed.out)
