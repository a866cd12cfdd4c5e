"""One measurement of `training_cost`, in a process of its own so that its memory is its own.

Prints one line of JSON: `Cost`.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TrainerCallback

from prefillshare_server.models import store
from prefillshare_training import models, trainer
from prefillshare_training.samples import Sample, Turn
from prefillshare_training.settings import LoraSettings, TrainSettings

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

WARM_UP_STEPS = 1
"""Not timed: memory is allocated and the optimizer's state made."""


@dataclass(frozen=True)
class Job:
    """What is measured."""

    base: str
    method: str
    """``prefillshare`` or ``full-ft``."""
    lora: bool
    prompt: int
    """Tokens of each prompt."""
    completion: int
    """Tokens of each answer."""
    steps: int
    """Optimizer steps that are timed."""
    accumulation: int
    """Samples in each of them."""
    bf16: bool
    """Compute in bfloat16, and keep the frozen base in it; trained weights are float32."""
    threads: int


@dataclass(frozen=True)
class Cost:
    """What it cost."""

    tokens_per_s: float
    """Tokens of prompts and answers together, by the clock."""
    tokens_per_cpu_s: float
    """The same by the processor time of this process: what others do here disturbs it less."""
    peak_memory_bytes: int
    """Largest resident size of the process, loading included."""
    loss: float


class _Clock(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Time from the end of the warm-up to the end of training."""

    def __init__(self) -> None:
        self._start = (0.0, 0.0)
        self.wall_s = self.cpu_s = 0.0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        now = (time.perf_counter(), time.process_time())
        if state.global_step == WARM_UP_STEPS:
            self._start = now
        self.wall_s, self.cpu_s = now[0] - self._start[0], now[1] - self._start[1]


def measure(job: Job) -> Cost:
    """Train on random tokens; the process's memory before that counts as well."""
    torch.set_num_threads(job.threads)
    base_dir = store.resolve(job.base)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainSettings.model_validate(
            {
                "base": job.base,
                "data": "random tokens",
                "out": Path(folder) / "decoder",
                "method": job.method,
                "lora": LoraSettings() if job.lora else None,
                "accumulation": job.accumulation,
                "bf16": job.bf16,
                "max_steps": WARM_UP_STEPS + job.steps,
            }
        )
        pair = models.load(base_dir, settings)
        args = trainer.arguments(settings)
        args.save_strategy, args.report_to = transformers.trainer_utils.SaveStrategy.NO, []
        clock = _Clock()
        samples = _samples(job, vocabulary=pair.decoder.get_input_embeddings().num_embeddings)
        training = trainer.DecoderTrainer(
            pair, args, train_dataset=trainer.rows(samples, settings), callbacks=[clock]
        )
        training.remove_callback(transformers.trainer_callback.PrinterCallback)
        outcome = training.train()
    tokens = job.steps * job.accumulation * (job.prompt + job.completion)
    return Cost(
        tokens_per_s=tokens / clock.wall_s,
        tokens_per_cpu_s=tokens / clock.cpu_s,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        loss=outcome.training_loss,
    )


def _samples(job: Job, vocabulary: int) -> list[Sample]:
    draw = torch.Generator().manual_seed(0)
    samples = []
    for _ in range((WARM_UP_STEPS + job.steps) * job.accumulation):
        ids = torch.randint(vocabulary, (job.prompt + job.completion,), generator=draw).tolist()
        samples.append(Sample((Turn(tuple(ids[: job.prompt]), tuple(ids[job.prompt :])),)))
    return samples


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(json.dumps(asdict(measure(Job(**json.loads(sys.argv[1]))))), flush=True)
