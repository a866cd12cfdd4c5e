"""What a run leaves beside its output so that it can go on: settings, complete checkpoints.

A checkpoint counts only with the mark that is written after everything else in it; one without is
what a crash or a full disk left, and is removed. Nothing is removed that no run has written.
"""

from __future__ import annotations

import json
import shutil
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import provenance

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from transformers import TrainerControl, TrainerState, TrainingArguments

    from prefillshare_training.settings import TrainSettings

_MARK = "complete"
_SETTINGS = "run.json"
_RESULT = "result.json"
_UNFINISHED = ("checkpoint-*", "lr-*.run/checkpoint-*", f"lr-*/{provenance.FILE}")
"""What a run, or one of a grid of learning rates, removes when it is finished."""

# They change how a run looks or ends, not what any step computes.
_FREE = frozenset({"resume", "overwrite", "save_steps", "logging_steps", "out", "skip_bad"})


def begin(settings: TrainSettings, data_sha256: str) -> Path | None:
    """Prepare the run's folder; returns the checkpoint to go on from, if any.

    Raises ConfigError when another run is in the way, when the run to be resumed had other
    settings or other data (its result would be neither run's), and when nothing can be written.
    """
    folder = settings.run_dir
    now = _computed(settings, data_sha256)
    file = folder / _SETTINGS
    if settings.resume:
        _require_same(file, now)
        return _latest(folder)
    if not settings.overwrite and any(any(folder.glob(each)) for each in _UNFINISHED):
        raise ConfigError(
            Problem(
                str(folder),
                "has the checkpoints of an unfinished run",
                "go on with --resume, or start anew with --overwrite",
            )
        )
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        file.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            Problem(
                str(folder),
                f"cannot be written ({error.strerror or error})",
                "free some space, or name another folder with --out",
            )
        ) from None
    return None


def begun(settings: TrainSettings) -> bool:
    """Whether there is a run to go on with."""
    return (settings.run_dir / _SETTINGS).is_file()


def finish(settings: TrainSettings) -> None:
    """Remove what only an unfinished run needs; the logs stay."""
    for checkpoint in settings.run_dir.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)


def keep_result(settings: TrainSettings, result: Mapping[str, Any]) -> None:
    """Note what a finished run came to, for `kept_result`."""
    provenance.replace_file(settings.run_dir / _RESULT, json.dumps(result).encode())


def kept_result(settings: TrainSettings, data_sha256: str) -> dict[str, Any] | None:
    """What the run came to, if it is finished and its decoder still there.

    Raises ConfigError when it was a run of other settings or data.
    """
    try:
        text = (settings.run_dir / _RESULT).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    _require_same(settings.run_dir / _SETTINGS, _computed(settings, data_sha256))
    result: dict[str, Any] = json.loads(text)
    return result if (settings.out / provenance.FILE).is_file() else None


def require_free_output(settings: TrainSettings, base_dir: Path) -> None:
    """Raise ConfigError when something is where the decoder or the run's files are to be written.

    ``--overwrite`` allows to replace a decoder that was trained here, and nothing else.
    """
    out, where = settings.out, f"--out {settings.out}"
    if out.name in ("", ".."):
        raise ConfigError(
            Problem(where, "names no folder of its own", "name a folder for the decoder")
        )
    for kept in (base_dir.resolve(), Path(settings.data).expanduser().resolve()):
        for place in (out.resolve(), settings.run_dir.resolve()):
            if kept.exists() and kept.is_relative_to(place):
                raise ConfigError(
                    Problem(where, f"would take the place of {kept}", "name another folder")
                )
    if out.exists() and not out.is_dir():
        raise ConfigError(Problem(where, "is a file", "name a folder for the decoder"))
    if out.is_dir() and any(out.iterdir()):
        if not settings.overwrite:
            raise ConfigError(Problem(where, "is not empty", "name another folder, or --overwrite"))
        if not (out / provenance.FILE).is_file():
            raise ConfigError(
                Problem(where, "holds no decoder of an earlier run", "name another folder")
            )
    folder = settings.run_dir
    if folder.exists() and not begun(settings) and not (folder.is_dir() and _empty(folder)):
        raise ConfigError(
            Problem(where, f"{folder} is there and is no run's folder", "name another folder")
        )


class MarkComplete(TrainerCallback):
    """Marks a checkpoint after its last file is written."""

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Called when a checkpoint has been saved."""
        if state.is_world_process_zero:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            (folder / _MARK).touch()


class StopOnSignal(TrainerCallback):
    """The first Ctrl-C or SIGTERM ends the run after a checkpoint, the second one at once."""

    def __init__(self) -> None:
        self.stopped = False
        """Whether any process of the run was told to."""
        self._told = False
        # Signals reach the main thread only, and only there may it be said what they do.
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._before = {
            number: signal.signal(number, self._stop)
            for number in (signal.SIGINT, signal.SIGTERM)
            if in_main_thread
        }

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Called after an optimizer step; every process then knows what any of them was told."""
        self.stopped = _of_any_process(self._told, args.device)
        if self.stopped and state.global_step < state.max_steps:
            control.should_save = True
            control.should_training_stop = True

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._told:
            raise KeyboardInterrupt
        self._told = True


def _of_any_process(told: bool, device: torch.device) -> bool:
    """All processes must stop after the same step: the others would wait for one that is gone."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return told
    shared = torch.tensor(int(told), device=device)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
    return bool(shared)


def _computed(settings: TrainSettings, data_sha256: str) -> dict[str, Any]:
    """What decides the result of a run."""
    return {**settings.model_dump(mode="json", exclude=set(_FREE)), "data_sha256": data_sha256}


def _empty(folder: Path) -> bool:
    return not any(folder.iterdir())


def _require_same(file: Path, now: Mapping[str, Any]) -> None:
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(
            Problem(str(file.parent), "has no run to go on with", "leave out --resume")
        ) from None
    # What an earlier version did not write down cannot be compared.
    different = [key for key in before if before[key] != now.get(key)]
    if different:
        key = different[0]
        raise ConfigError(
            Problem(
                f"--resume: {key}",
                f"was {before.get(key)!r} in the run and is {now.get(key)!r} now",
                "give the same settings and data, or start anew with --overwrite",
            )
        )


def _latest(folder: Path) -> Path | None:
    complete: dict[int, Path] = {}
    for checkpoint in folder.glob("checkpoint-*"):
        if (checkpoint / _MARK).is_file():
            complete[int(checkpoint.name.rpartition("-")[2])] = checkpoint
        else:
            shutil.rmtree(checkpoint, ignore_errors=True)
    return complete[max(complete)] if complete else None
