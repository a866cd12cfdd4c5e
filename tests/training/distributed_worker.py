"""One process of a distributed run on CPU: `python -m torch.distributed.run` starts several.

accelerate shards on accelerators only; so that FSDP can be tested without one, it is told that its
CPU processes are accelerators.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, DistributedType, PartialState
from rich.console import Console
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from prefillshare_training import run_state
from prefillshare_training.settings import TrainSettings
from prefillshare_training.train import Interrupted, train

STOP_AFTER = int(os.environ.get("STOP_FIRST_PROCESS_AFTER", "0"))
FSDP = os.environ.get("ACCELERATE_USE_FSDP") == "true"


class ReportSharding(run_state.MarkComplete):
    """Says what part of the decoder's parameters is sharded."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        sharded = [isinstance(parameter, DTensor) for parameter in model.parameters()]
        print(f"sharded {sum(sharded)} of {len(sharded)}", flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero and state.global_step == STOP_AFTER:
            os.kill(os.getpid(), signal.SIGINT)


def pretend_to_be_accelerators() -> None:
    """Let accelerate choose FSDP although the device is the CPU."""
    begin = AcceleratorState.__init__

    def begin_as_accelerator(self: Any, *args: Any, **options: Any) -> None:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        begin(self, *args, **options)

    AcceleratorState.__init__ = begin_as_accelerator


if __name__ == "__main__":
    assert issubclass(ReportSharding, TrainerCallback)
    if FSDP:
        pretend_to_be_accelerators()
    run_state.MarkComplete = ReportSharding  # type: ignore[misc]
    settings = TrainSettings.model_validate_json(Path(sys.argv[1]).read_text())
    try:
        train(settings, Console(quiet=True))
    except Interrupted as stopped:
        print(stopped, flush=True)
