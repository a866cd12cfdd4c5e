"""What a run leaves beside its output so that it can go on: settings, complete checkpoints.

A checkpoint counts only with the mark that is written after everything else in it; one without is
what a crash or a full disk left, and is removed.
"""

from __future__ import annotations

import json
import shutil
import signal
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from prefillshare_server.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import FrameType

    from transformers import TrainerControl, TrainerState, TrainingArguments

    from prefillshare_training.settings import TrainSettings

_MARK = "complete"
_SETTINGS = "run.json"

# They change how a run looks or ends, not what any step computes.
_FREE = frozenset(
    {"resume", "overwrite", "save_steps", "logging_steps", "out", "skip_bad", "limit"}
)


def begin(settings: TrainSettings, data_sha256: str) -> Path | None:
    """Prepare the run's folder; returns the checkpoint to go on from, if any.

    Raises ConfigError when the output or another run is in the way, or when the run to be resumed
    had other settings or other data: its result would be neither run's.
    """
    require_free_output(settings)
    folder = settings.run_dir
    now = {**settings.model_dump(mode="json", exclude=set(_FREE)), "data_sha256": data_sha256}
    file = folder / _SETTINGS
    if settings.resume:
        _require_same(file, now)
        return _latest(folder)
    if any(folder.glob("checkpoint-*")) and not settings.overwrite:
        raise ConfigError(
            Problem(
                str(folder),
                "has the checkpoints of an unfinished run",
                "go on with --resume, or start anew with --overwrite",
            )
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
    return None


def finish(settings: TrainSettings) -> None:
    """Remove what only an unfinished run needs; the logs stay."""
    for checkpoint in settings.run_dir.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)


def require_free_output(settings: TrainSettings) -> None:
    """Raise ConfigError when something is where the decoder is to be written."""
    if settings.out.exists() and not settings.out.is_dir():
        raise ConfigError(
            Problem(f"--out {settings.out}", "is a file", "name a folder for the decoder")
        )
    if not settings.overwrite and settings.out.is_dir() and any(settings.out.iterdir()):
        raise ConfigError(
            Problem(f"--out {settings.out}", "is not empty", "name another folder, or --overwrite")
        )


class MarkComplete(TrainerCallback):
    """Marks a checkpoint after its last file is written."""

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Called when a checkpoint has been saved."""
        from pathlib import Path

        if state.is_world_process_zero:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            (folder / _MARK).touch()


class StopOnSignal(TrainerCallback):
    """The first Ctrl-C or SIGTERM ends the run after a checkpoint, the second one at once."""

    def __init__(self) -> None:
        self.stopped = False
        self._before = {
            number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)
        }

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Called after an optimizer step."""
        if self.stopped and state.global_step < state.max_steps:
            control.should_save = True
            control.should_training_stop = True

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True


def _require_same(file: Path, now: Mapping[str, Any]) -> None:
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(
            Problem(str(file.parent), "has no run to go on with", "leave out --resume")
        ) from None
    different = [key for key in {**before, **now} if before.get(key) != now.get(key)]
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
