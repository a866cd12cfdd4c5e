"""One training run, from settings to a decoder that can be served."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate import PartialState
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from rich.console import Console
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import provenance, store
from prefillshare_training import data, models, output, prefix_tree, run_state
from prefillshare_training.progress import ShowProgress
from prefillshare_training.trainer import DecoderTrainer, arguments, rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefillshare_training.samples import Sample
    from prefillshare_training.settings import TrainSettings

_GRID_VALIDATION = 0.05


class Interrupted(Exception):
    """The run was stopped by a signal after a checkpoint; the text says how to go on."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run came to."""

    out: Path
    steps: int
    loss: float
    """Mean training loss per target of the steps of this process's run."""
    validation_loss: float | None
    tokens: int
    """Tokens of prompts and answers in one epoch's rows, shared ones once."""
    tokens_per_s: float
    """Tokens that went through the objective per second, both parts together."""
    peak_memory_bytes: int
    """Of the accelerator, or the process's largest resident size on CPU."""
    learning_rate: float


def train(settings: TrainSettings, console: Console | None = None) -> TrainResult:
    """Fine-tune a decoder and write it, with its provenance, to ``settings.out``.

    Nothing is in ``settings.out`` before everything is. Raises ConfigError for what the user can
    mend, and Interrupted after a signal.
    """
    console = console or Console(stderr=True, quiet=not _is_main())
    if settings.learning_rate_grid:
        return _search(settings, console)
    _quiet_libraries()
    base_dir = store.resolve(settings.base)
    dataset, renderer = load_data(settings, base_dir, console)
    checkpoint = run_state.begin(settings, dataset.sha256) if _is_main() else None
    checkpoint = _from_main(checkpoint)
    return _run(settings, base_dir, dataset, renderer.fingerprint, checkpoint, console)


def load_data(
    settings: TrainSettings, base_dir: Path, console: Console
) -> tuple[data.Dataset, data.Renderer]:
    """The samples of a run and the renderer that wrote them. Raises ConfigError."""
    renderer = data.Renderer.for_base(base_dir, settings.layout)
    with data.progress_bar(console) as progress:
        dataset = data.load(
            settings.data,
            renderer,
            preset=settings.preset,
            limit=settings.limit,
            skip_bad=settings.skip_bad,
            max_length=settings.max_length,
            seed=settings.seed,
            progress=progress,
        )
    for problem in dataset.problems:
        console.print(f"skipped: {problem}", highlight=False, markup=False, soft_wrap=True)
    if dataset.skipped or dataset.too_long:
        console.print(
            f"left out: {dataset.skipped} bad rows, {dataset.too_long} longer than "
            f"{settings.max_length} tokens",
            highlight=False,
        )
    return dataset, renderer


def _run(
    settings: TrainSettings,
    base_dir: Path,
    dataset: data.Dataset,
    layout_fingerprint: str,
    checkpoint: Path | None,
    console: Console,
) -> TrainResult:
    transformers.set_seed(settings.seed)
    pair = models.load(base_dir, settings)
    trained = sum(p.numel() for p in pair.decoder.parameters() if p.requires_grad)
    # A checkpoint has the weights and two moments of each in float32; two of them are kept.
    output.require_space(settings.out, output.size(pair.decoder, base_dir) + 2 * 12 * trained)
    training, held_out = _split(dataset.samples, settings)
    tokens = sum(map(prefix_tree.size, training))
    _announce(settings, pair, training, tokens, console)
    args = arguments(settings)
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(settings.run_dir / "logs")
    stop, progress = run_state.StopOnSignal(), ShowProgress(console)
    trainer = DecoderTrainer(
        pair,
        args,
        train_dataset=rows(training, settings),
        eval_dataset=[[sample] for sample in held_out] or None,
        callbacks=[run_state.MarkComplete(), stop, progress],
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    try:
        with output.disk_full_is_an_error(settings.run_dir):
            outcome = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        progress.stop()
        stop.restore()
    if stop.stopped and trainer.state.global_step < trainer.state.max_steps:
        raise Interrupted(
            f"stopped after step {trainer.state.global_step} of {trainer.state.max_steps}; "
            "run the same command with --resume to go on"
        )
    validation_loss = trainer.evaluate()["eval_loss"] if held_out else None
    done = trainer.state.global_step - (_step_of(checkpoint) if checkpoint else 0)
    share = done / max(trainer.state.max_steps, 1) * trainer.state.num_train_epochs
    seconds = outcome.metrics["train_runtime"]
    result = TrainResult(
        out=settings.out,
        steps=trainer.state.global_step,
        loss=outcome.training_loss,
        validation_loss=validation_loss,
        tokens=tokens,
        tokens_per_s=tokens * (trainer.state.epoch or share) / seconds,
        peak_memory_bytes=_peak_memory(),
        learning_rate=settings.learning_rate,
    )
    weights = _weights(trainer)
    if _is_main():
        record = _provenance(settings, base_dir, layout_fingerprint, dataset, training, result)
        output.write(pair.decoder, weights, base_dir, record, settings.out)
        run_state.finish(settings)
    _processes().wait_for_everyone()
    return result


def _search(settings: TrainSettings, console: Console) -> TrainResult:
    """One run for each learning rate; the one with the lowest validation loss is the result."""
    results: list[TrainResult] = []
    for rate in settings.learning_rate_grid:
        console.print(f"learning rate {rate:g}", highlight=False)
        run = settings.model_copy(
            update={
                "learning_rate": rate,
                "learning_rate_grid": (),
                "validation": settings.validation or _GRID_VALIDATION,
                "out": settings.run_dir / f"lr-{rate:g}",
                "overwrite": True,
            }
        )
        results.append(train(run, console))
    best = min(results, key=lambda result: result.validation_loss or float("inf"))
    losses = {f"{each.learning_rate:g}": each.validation_loss for each in results}
    console.print(f"validation losses {losses}; best {best.learning_rate:g}", highlight=False)
    if _is_main():
        run_state.require_free_output(settings)
        shutil.rmtree(settings.out, ignore_errors=True)
        best.out.rename(settings.out)
        for each in results:
            shutil.rmtree(each.out, ignore_errors=True)
    _processes().wait_for_everyone()
    return TrainResult(**{**_fields(best), "out": settings.out})


def _split(samples: Sequence[Sample], settings: TrainSettings) -> tuple[list[Sample], list[Sample]]:
    """Samples to train on, in their order, and those kept for validation."""
    kept = round(len(samples) * settings.validation)
    if settings.validation > 0 and not 0 < kept < len(samples):
        raise ConfigError(
            Problem(
                "--validation",
                f"{settings.validation:g} of {len(samples)} samples leaves one side empty",
                "give more data or another share",
            )
        )
    generator = torch.Generator().manual_seed(settings.seed)
    chosen = set(torch.randperm(len(samples), generator=generator)[:kept].tolist())
    training = [sample for index, sample in enumerate(samples) if index not in chosen]
    return training, [samples[index] for index in sorted(chosen)]


def _announce(
    settings: TrainSettings,
    pair: models.Models,
    training: Sequence[Sample],
    tokens: int,
    console: Console,
) -> None:
    trained = sum(p.numel() for p in pair.decoder.parameters() if p.requires_grad)
    targets = sum(len(turn.completion_ids) for sample in training for turn in sample.turns)
    kind = f"LoRA rank {settings.lora.rank}" if settings.lora else "all weights"
    console.print(
        f"{settings.method}: {kind}, {trained:,} parameters; {len(training)} samples, "
        f"{tokens:,} tokens, {targets:,} of them targets; logs in {settings.run_dir / 'logs'}",
        highlight=False,
        soft_wrap=True,
    )


def _weights(trainer: DecoderTrainer) -> dict[str, torch.Tensor]:
    """The trained weights, gathered on the main process. Every process must call it."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    everything = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=everything)
    if isinstance(model, PeftModel):
        return dict(get_peft_model_state_dict(model, state_dict=weights))
    return weights


def _provenance(
    settings: TrainSettings,
    base_dir: Path,
    layout_fingerprint: str,
    dataset: data.Dataset,
    training: Sequence[Sample],
    result: TrainResult,
) -> provenance.Provenance:
    skip = {"base", "data", "out", "resume", "overwrite", "save_steps", "logging_steps"}
    return provenance.Provenance(
        method=settings.method,
        base=settings.base,
        base_fingerprint=provenance.base_fingerprint(base_dir),
        layout_fingerprint=layout_fingerprint,
        data={
            "source": dataset.source,
            "sha256": dataset.sha256,
            "samples": len(training),
            "tokens": result.tokens,
            "skipped": dataset.skipped,
            "too_long": dataset.too_long,
        },
        hyperparameters=settings.model_dump(mode="json", exclude=skip)
        | {"steps": result.steps, "loss": result.loss, "validation_loss": result.validation_loss},
        evaluation=[],
        versions={
            name: metadata.version(name)
            for name in ("prefillshare-agents", "transformers", "torch", "peft")
        },
    )


def _quiet_libraries() -> None:
    """Our own progress bar is the only one."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"torch\.utils\.tensorboard.*")


def _processes() -> PartialState:
    # Without the hint every process of a CPU run takes itself for the only one.
    return PartialState(cpu=not torch.accelerator.is_available())


def _is_main() -> bool:
    return bool(_processes().is_main_process)


def _from_main(value: Any) -> Any:
    """The main process's `value`, on every process."""
    if _processes().num_processes == 1:
        return value
    shared = [value]
    torch.distributed.broadcast_object_list(shared)
    return shared[0]


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _peak_memory() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _fields(result: TrainResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in TrainResult.__dataclass_fields__}
