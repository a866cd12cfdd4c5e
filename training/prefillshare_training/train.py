"""One training run, from settings to a decoder that can be served."""

from __future__ import annotations

import logging
import math
import os
import resource
import shutil
import sys
import warnings
from dataclasses import asdict, dataclass, replace
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


class Diverged(ConfigError):
    """The decoder's weights are not numbers any more."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run came to."""

    out: Path
    steps: int
    loss: float
    """Mean training loss per target of the steps that this call made; of the last logged ones
    when a resumed run had none left."""
    validation_loss: float | None
    tokens: int
    """Tokens of prompts and answers in one epoch's rows, shared ones once."""
    tokens_per_s: float
    """Tokens that went through the objective per second, both parts together."""
    peak_memory_bytes: int
    """Of the accelerator, or the process's largest resident size on CPU."""
    learning_rate: float


@dataclass(frozen=True, slots=True)
class _Source:
    """What a run trains on: the base and the rendered data."""

    base_dir: Path
    base_fingerprint: str
    layout_fingerprint: str
    dataset: data.Dataset


def train(settings: TrainSettings, console: Console | None = None) -> TrainResult:
    """Fine-tune a decoder and write it, with its provenance, to ``settings.out``.

    Nothing is in ``settings.out`` before everything is. Raises ConfigError for what the user can
    mend, and Interrupted after a signal.
    """
    console = console or Console(stderr=True, quiet=not is_main())
    _quiet_libraries()
    base_dir = store.resolve(settings.base)
    if is_main():
        run_state.require_free_output(settings, base_dir)
    fingerprint = provenance.base_fingerprint(base_dir)
    dataset, renderer = load_data(settings, base_dir, console)
    source = _Source(base_dir, fingerprint, renderer.fingerprint, dataset)
    run = _search if settings.learning_rate_grid else _run
    return run(settings, source, console)


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


def _run(settings: TrainSettings, source: _Source, console: Console) -> TrainResult:
    dataset, base_dir = source.dataset, source.base_dir
    checkpoint = _from_main(run_state.begin(settings, dataset.sha256) if is_main() else None)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
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
    try:
        trainer = DecoderTrainer(
            pair,
            args,
            train_dataset=rows(training, settings),
            eval_dataset=[[sample] for sample in held_out] or None,
            callbacks=[run_state.MarkComplete(), stop, progress],
        )
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
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
    weights = _weights(trainer)
    if not _from_main(all(bool(each.isfinite().all()) for each in weights.values())):
        raise Diverged(
            Problem(
                f"--learning-rate {settings.learning_rate:g}",
                "the training diverged: weights are not numbers any more",
                "start anew with a lower one, or with --max-grad-norm 1",
            )
        )
    with output.disk_full_is_an_error(settings.run_dir):
        validation_loss = trainer.evaluate()["eval_loss"] if held_out else None
    steps = trainer.state.global_step
    done = steps - (_step_of(checkpoint) if checkpoint else 0)
    epochs = (trainer.state.epoch or 0.0) * done / steps
    result = TrainResult(
        out=settings.out,
        steps=steps,
        loss=outcome.training_loss if done else _last_logged_loss(trainer),
        validation_loss=validation_loss,
        tokens=tokens,
        tokens_per_s=tokens * epochs / outcome.metrics["train_runtime"],
        peak_memory_bytes=_peak_memory(),
        learning_rate=settings.learning_rate,
    )
    if is_main():
        record = _provenance(settings, source, training, result)
        output.write(pair.decoder, weights, base_dir, record, settings.out)
        run_state.finish(settings)
    _processes().wait_for_everyone()
    return result


def _search(settings: TrainSettings, source: _Source, console: Console) -> TrainResult:
    """One run for each learning rate; the one with the lowest validation loss is the result.

    A resumed search goes on with the run that was stopped. Raises Diverged when all did.
    """
    if is_main():
        run_state.begin(settings, source.dataset.sha256)
    results: list[TrainResult] = []
    failure: Diverged | None = None
    for rate in dict.fromkeys(settings.learning_rate_grid):
        console.print(f"learning rate {rate:g}", highlight=False)
        try:
            results.append(_tried(settings, rate, source, console))
        except Diverged as error:
            failure = error
            console.print(str(error), highlight=False, markup=False, soft_wrap=True)
    if failure is not None and not results:
        raise failure
    best = min(results, key=_finite_validation_loss)
    losses = {f"{each.learning_rate:g}": each.validation_loss for each in results}
    console.print(f"validation losses {losses}; best {best.learning_rate:g}", highlight=False)
    if is_main():
        output.take_place(best.out, settings.out)
        for each in results:
            shutil.rmtree(each.out, ignore_errors=True)
    _processes().wait_for_everyone()
    return replace(best, out=settings.out)


def _tried(settings: TrainSettings, rate: float, source: _Source, console: Console) -> TrainResult:
    """The run of a search with one learning rate, unless it is done already."""
    run = settings.model_copy(
        update={
            "learning_rate": rate,
            "learning_rate_grid": (),
            "validation": settings.validation or _GRID_VALIDATION,
            "out": settings.run_dir / f"lr-{rate}",
            "overwrite": True,
        }
    )
    # Where no run was begun before, there is none to go on with.
    run = run.model_copy(update={"resume": settings.resume and run_state.begun(run)})
    sha256 = source.dataset.sha256
    kept = _from_main(run_state.kept_result(run, sha256) if run.resume and is_main() else None)
    if kept is not None:
        return TrainResult(**{**kept, "out": run.out})
    try:
        result = _run(run, source, console)
    except Diverged:
        if is_main():
            run_state.finish(run)
        raise
    if is_main():
        run_state.keep_result(run, asdict(result) | {"out": str(run.out)})
    return result


def _finite_validation_loss(result: TrainResult) -> float:
    loss = result.validation_loss
    return loss if loss is not None and math.isfinite(loss) else math.inf


def _last_logged_loss(trainer: DecoderTrainer) -> float:
    logged = (each["loss"] for each in reversed(trainer.state.log_history) if "loss" in each)
    return float(next(logged, math.nan))


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
    settings: TrainSettings, source: _Source, training: Sequence[Sample], result: TrainResult
) -> provenance.Provenance:
    dataset = source.dataset
    skip = {"base", "data", "out", "resume", "overwrite", "save_steps", "logging_steps"}
    return provenance.Provenance(
        method=settings.method,
        base=settings.base,
        base_fingerprint=source.base_fingerprint,
        layout_fingerprint=source.layout_fingerprint,
        data={
            "source": dataset.source,
            "sha256": dataset.sha256,
            "samples": len(training),
            "tokens": result.tokens,
            "skipped": dataset.skipped,
            "too_long": dataset.too_long,
        },
        hyperparameters=settings.model_dump(mode="json", exclude=skip)
        | {
            "processes": _processes().num_processes,
            "steps": result.steps,
            "loss": result.loss,
            "validation_loss": result.validation_loss,
        },
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


def is_main() -> bool:
    """Whether this process writes and speaks for all of the run."""
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
