"""A run leaves a whole decoder or none, and can be stopped and gone on with."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from prefillshare_server.errors import ConfigError
from prefillshare_server.models import checkpoint
from prefillshare_server.models.geometry import Geometry, differences
from prefillshare_server.models.provenance import Provenance
from prefillshare_training import run_state
from prefillshare_training.settings import LoraSettings, TrainSettings
from prefillshare_training.train import Diverged, Interrupted, train
from prefillshare_training.trainer import DecoderTrainer, arguments
from tests.training.runs import (
    LORA,
    QUIET,
    require_equal,
    settings,
    stop_after,
    weights,
    write_rows,
)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_decoder_learns_and_is_written_with_its_provenance(
    base_dir: Path, tmp_path: Path, lora: LoraSettings | None
) -> None:
    run = settings(base_dir, tmp_path, lora=lora, validation=0.25, epochs=4, learning_rate=5e-3)
    result = train(run, QUIET)
    untaught = train(
        run.model_copy(update={"out": tmp_path / "untaught", "learning_rate": 1e-9}), QUIET
    )
    assert result.validation_loss is not None
    assert untaught.validation_loss is not None
    assert result.validation_loss < untaught.validation_loss - 0.3
    record = Provenance.read(run.out)
    assert record is not None
    assert (record.method, record.base) == ("prefillshare", str(base_dir))
    assert record.data["samples"] == 24
    assert record.hyperparameters["learning_rate"] == 5e-3
    assert record.hyperparameters["steps"] == result.steps == 24
    assert not list(run.run_dir.glob("checkpoint-*"))
    assert list((run.run_dir / "logs").glob("events.out.tfevents.*"))


def test_a_full_decoder_is_an_ordinary_checkpoint_that_fits_its_base(
    base_dir: Path, tmp_path: Path
) -> None:
    run = settings(base_dir, tmp_path)
    train(run, QUIET)
    assert differences(Geometry.of(base_dir), Geometry.of(run.out)) == []
    assert checkpoint.dtype(run.out) == checkpoint.dtype(base_dir) == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(run.out, dtype=torch.float32)
    trained = weights(run.out)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained[name]), name
    assert "prefillshare" not in json.loads((run.out / "config.json").read_text()).values()


def test_an_adapter_names_the_base_as_the_user_did(base_dir: Path, tmp_path: Path) -> None:
    run = settings(base_dir, tmp_path, lora=LORA)
    train(run, QUIET)
    assert sorted(path.name for path in run.out.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "prefillshare.json",
    ]
    config = json.loads((run.out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base_dir)
    assert sorted(config["target_modules"]) == sorted(LORA.targets)
    assert {name.split(".")[-3] for name in weights(run.out)} == set(LORA.targets)


def test_the_base_on_disk_is_untouched(base_dir: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in base_dir.iterdir() if path.is_file()}
    train(settings(base_dir, tmp_path), QUIET)
    assert {p.name: p.read_bytes() for p in base_dir.iterdir() if p.is_file()} == before


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(
    base_dir: Path, tmp_path: Path
) -> None:
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    for out, seed in ((first, 1), (second, 1), (other, 2)):
        train(settings(base_dir, tmp_path, out=out, seed=seed), QUIET)
    require_equal(first, second)
    assert any(
        not torch.equal(tensor, weights(other)[name]) for name, tensor in weights(first).items()
    )


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_goes_on_to_the_very_same_weights(
    base_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lora: LoraSettings | None,
    number: int,
) -> None:
    """Dropout draws random numbers, so the generators' states must come back too."""
    if lora is not None:
        lora = lora.model_copy(update={"dropout": 0.1})
    undisturbed = settings(base_dir, tmp_path, out=tmp_path / "undisturbed", lora=lora)
    train(undisturbed, QUIET)
    run = settings(base_dir, tmp_path, lora=lora)
    with monkeypatch.context() as patch:
        stop_after(patch, 5, number)
        with pytest.raises(Interrupted, match="after step 5 of 8"):
            train(run, QUIET)
    assert not run.out.exists()
    train(run.model_copy(update={"resume": True}), QUIET)
    require_equal(run.out, undisturbed.out)


def test_a_second_signal_stops_at_once_and_leaves_only_complete_checkpoints(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = settings(base_dir, tmp_path)
    before = signal.getsignal(signal.SIGINT)

    class Impatient(run_state.MarkComplete):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(run_state, "MarkComplete", Impatient)
        with pytest.raises(KeyboardInterrupt):
            train(run, QUIET)
    assert not run.out.exists()
    assert [path.name for path in run.run_dir.glob("checkpoint-*")] == ["checkpoint-3"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_checkpoint_without_its_mark_is_not_gone_on_from(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = settings(base_dir, tmp_path)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Interrupted):
            train(run, QUIET)
    (run.run_dir / "checkpoint-5" / "complete").unlink()
    (run.run_dir / "checkpoint-5" / "model.safetensors").write_bytes(b"half")
    train(run.model_copy(update={"resume": True}), QUIET)
    undisturbed = settings(base_dir, tmp_path, out=tmp_path / "undisturbed")
    train(undisturbed, QUIET)
    require_equal(run.out, undisturbed.out)


def test_resume_with_other_settings_or_data_is_refused(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = settings(base_dir, tmp_path)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Interrupted):
            train(run, QUIET)
    with pytest.raises(ConfigError, match=r"learning_rate.*0\.001.*0\.1"):
        train(run.model_copy(update={"resume": True, "learning_rate": 0.1}), QUIET)
    write_rows(Path(run.data), 31)
    with pytest.raises(ConfigError, match="data_sha256"):
        train(run.model_copy(update={"resume": True}), QUIET)


def test_an_unfinished_run_is_not_overwritten_by_accident(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = settings(base_dir, tmp_path)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Interrupted):
            train(run, QUIET)
    with pytest.raises(ConfigError, match=r"unfinished run.*--resume.*--overwrite"):
        train(run, QUIET)


def test_resume_with_another_limit_is_refused(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples would be others, although the file is the same."""
    run = settings(base_dir, tmp_path, limit=24)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Interrupted):
            train(run, QUIET)
    with pytest.raises(ConfigError, match=r"limit.*24.*28"):
        train(run.model_copy(update={"resume": True, "limit": 28}), QUIET)


def test_a_resumed_run_reports_its_own_speed(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary = DecoderTrainer.train

    def in_a_second(self: DecoderTrainer, **options: Any) -> Any:
        outcome = ordinary(self, **options)
        outcome.metrics["train_runtime"] = 1.0
        return outcome

    run = settings(base_dir, tmp_path)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Interrupted):
            train(run, QUIET)
    monkeypatch.setattr(DecoderTrainer, "train", in_a_second)
    result = train(run.model_copy(update={"resume": True}), QUIET)
    assert result.tokens_per_s == pytest.approx(result.tokens * 3 / 8)


def test_resume_without_a_run_is_refused(base_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to go on with"):
        train(settings(base_dir, tmp_path, resume=True), QUIET)


def test_an_output_that_is_there_is_not_overwritten_by_accident(
    base_dir: Path, tmp_path: Path
) -> None:
    run = settings(base_dir, tmp_path)
    run.out.mkdir()
    (run.out / "mine").write_text("precious")
    with pytest.raises(ConfigError, match=r"not empty.*--overwrite"):
        train(run, QUIET)
    with pytest.raises(ConfigError, match="no decoder of an earlier run"):
        train(run.model_copy(update={"overwrite": True}), QUIET)
    assert (run.out / "mine").read_text() == "precious"


def test_a_decoder_is_replaced_on_demand(base_dir: Path, tmp_path: Path) -> None:
    run = settings(base_dir, tmp_path)
    train(run, QUIET)
    (run.out / "leftover").touch()
    train(run.model_copy(update={"overwrite": True}), QUIET)
    assert not (run.out / "leftover").exists()
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_too_little_space_is_said_before_the_first_step(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Little:
        free = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Little)
    with pytest.raises(ConfigError, match=r"0\.0 GB free.*free some space"):
        train(settings(base_dir, tmp_path), QUIET)


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    RuntimeError("[enforce fail] PytorchStreamWriter failed writing file: No space left on device"),
]


@pytest.mark.parametrize("error", FULL, ids=["os", "torch"])
@pytest.mark.parametrize("what", ["model", "provenance"])
def test_a_disk_that_fills_up_at_the_end_leaves_nothing_that_loads(
    base_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    what: str,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    run = settings(base_dir, tmp_path)
    with monkeypatch.context() as patch:
        if what == "model":
            patch.setattr(shutil, "copyfile", full)
        else:
            patch.setattr(Provenance, "write", full)
        with pytest.raises(ConfigError, match=r"disk is full.*--resume"):
            train(run, QUIET)
    assert not run.out.exists()
    assert not list(tmp_path.glob(".*.partial"))
    train(run.model_copy(update={"resume": True}), QUIET)
    assert Provenance.read(run.out) is not None


@pytest.mark.parametrize("error", FULL, ids=["os", "torch"])
def test_a_disk_that_fills_up_at_a_checkpoint_is_an_error_and_the_run_goes_on_later(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    run = settings(base_dir, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(DecoderTrainer, "_save_rng_state", full)
        with pytest.raises(ConfigError, match=r"disk is full.*--resume"):
            train(run, QUIET)
    train(run.model_copy(update={"resume": True}), QUIET)
    assert not list(run.run_dir.glob("checkpoint-*"))


def test_full_ft_trains_on_its_own_kv(base_dir: Path, tmp_path: Path) -> None:
    ordinary = settings(base_dir, tmp_path, method="full-ft", out=tmp_path / "ordinary")
    conditioned = settings(base_dir, tmp_path, out=tmp_path / "conditioned")
    train(ordinary, QUIET)
    train(conditioned, QUIET)
    record = Provenance.read(ordinary.out)
    assert record is not None
    assert record.method == "full-ft"
    ours, theirs = weights(ordinary.out), weights(conditioned.out)
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) > 1e-4


def test_packing_trains_on_every_sample_in_fewer_rows(base_dir: Path, tmp_path: Path) -> None:
    """One step over everything, so that the same targets are in both."""
    whole = {"accumulation": 32, "learning_rate": 1e-4}
    single = settings(base_dir, tmp_path, out=tmp_path / "single", **whole)
    packed = settings(
        base_dir, tmp_path, out=tmp_path / "packed", packing=True, max_length=400, **whole
    )
    train(single, QUIET)
    train(packed, QUIET)
    # AdamW's first step is the gradient's sign, so rounding shows where a gradient is near zero.
    ours, theirs = weights(single.out), weights(packed.out)
    same = sum((ours[n] - theirs[n]).abs().lt(1e-6).sum().item() for n in ours)
    assert same / sum(tensor.numel() for tensor in ours.values()) > 0.999


def test_a_run_that_diverges_writes_no_decoder(base_dir: Path, tmp_path: Path) -> None:
    run = settings(base_dir, tmp_path, learning_rate=1e30)
    with pytest.raises(Diverged, match=r"--learning-rate 1e\+30.*--max-grad-norm"):
        train(run, QUIET)
    assert not run.out.exists()


def test_a_thread_can_train(base_dir: Path, tmp_path: Path) -> None:
    """Signals are the main thread's matter."""
    with ThreadPoolExecutor() as threads:
        result = threads.submit(train, settings(base_dir, tmp_path), QUIET).result()
    assert result.steps == 8


def test_one_process_trains_on_one_device(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left to itself the Trainer feeds all GPUs it sees, and so takes larger steps."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda _: 8))
    assert arguments(settings(base_dir, tmp_path))._n_gpu == 1


def test_a_layer_that_is_not_there_is_named(base_dir: Path, tmp_path: Path) -> None:
    lora = LoraSettings(rank=2, alpha=4, targets=("q_proj", "query"))
    with pytest.raises(ConfigError, match=r"no linear layer of its own named query.*q_proj"):
        train(settings(base_dir, tmp_path, lora=lora), QUIET)


def test_a_base_that_is_not_there_is_named(tmp_path: Path) -> None:
    run = TrainSettings(
        base="./nowhere", data=str(write_rows(tmp_path / "rows.jsonl")), out=tmp_path / "decoder"
    )
    with pytest.raises(ConfigError, match=r"nowhere.*no such directory"):
        train(run, QUIET)
    assert not run.out.exists()
    assert not run.run_dir.exists()
