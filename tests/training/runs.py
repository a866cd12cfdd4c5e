"""Small training runs on the tiny base."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import TrainerCallback

from prefillshare_training import run_state
from prefillshare_training.settings import LoraSettings, TrainSettings

LORA = LoraSettings(rank=4, alpha=8)
ROWS = 32
QUIET = Console(quiet=True)


def write_rows(path: Path, count: int = ROWS) -> Path:
    """Conversations of a word and its letters backwards, the same in every run."""
    source = random.Random(5)
    with path.open("w") as file:
        for _ in range(count):
            word = "".join(source.choice("abcdefgh") for _ in range(source.randrange(2, 9)))
            messages = [
                {"role": "system", "content": "Write it backwards."},
                {"role": "user", "content": word},
                {"role": "assistant", "content": word[::-1]},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def settings(base_dir: Path, folder: Path, **options: Any) -> TrainSettings:
    """8 steps of 4 samples."""
    data = folder / "rows.jsonl"
    if not data.exists():
        write_rows(data)
    return TrainSettings(
        **{
            "base": str(base_dir),
            "data": str(data),
            "out": folder / "decoder",
            "learning_rate": 1e-3,
            "accumulation": 4,
            "save_steps": 3,
            "logging_steps": 1,
            **options,
        }
    )


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a decoder."""
    [file] = directory.glob("*.safetensors")
    tensors: dict[str, torch.Tensor] = load_file(file)
    return tensors


def require_equal(left: Path, right: Path, tolerance: float = 0.0) -> None:
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).abs().max() <= tolerance, name


class StopAfter(TrainerCallback):
    """Sends this process a signal at the end of a step, once."""

    def __init__(self, step: int, number: int) -> None:
        self._step, self._number = step, number

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), self._number)


def stop_after(patch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT) -> None:
    class Marked(run_state.MarkComplete):
        def on_step_end(self, *args: Any, **options: Any) -> None:
            StopAfter(step, number).on_step_end(*args, **options)

    patch.setattr(run_state, "MarkComplete", Marked)
