"""Everything that decides a training run; the defaults are the paper's (appendix A.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from prefillshare_server.config import LayoutSettings

Method = Literal["prefillshare", "full-ft"]

PAPER_LEARNING_RATES = (1e-4, 1e-5, 2e-5, 5e-5, 2e-6, 5e-6)
"""The grid the paper searched for every data set (A.1)."""

PAPER_LORA_TARGETS = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The paper's LoRA leaves keys and values alone (appendix D, Table 13)."""

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LoraSettings(_Section):
    """A low-rank adapter instead of all weights; the defaults are those of the paper's Table 13."""

    rank: int = Field(default=128, ge=1)
    alpha: float = Field(default=256, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: tuple[str, ...] = Field(default=PAPER_LORA_TARGETS, min_length=1)
    """Names of the linear layers that get an adapter."""


class TrainSettings(_Section):
    """One training run."""

    base: str = Field(min_length=1)
    """Store name, directory, or hub id of the frozen base."""
    data: str = Field(min_length=1)
    """JSONL file, or of a preset also a folder or a hub id."""
    out: Path
    """Where the decoder is written; checkpoints and logs go to ``<out>.run`` beside it."""
    preset: str | None = None
    """How the rows of a known data set become conversations."""
    method: Method = "prefillshare"
    """``full-ft`` is ordinary fine-tuning on the model's own KV, for comparison."""
    lora: LoraSettings | None = None
    """None trains all weights of the decoder."""

    learning_rate: Rate = 2e-5
    learning_rate_grid: tuple[Rate, ...] = ()
    """Train once with each and keep the one with the lowest validation loss."""
    scheduler: Literal["cosine", "linear", "constant_with_warmup"] = "cosine"
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = Field(default=0.0, ge=0)
    """0 clips nothing, as in the paper."""
    epochs: float = Field(default=1.0, gt=0)
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps; None follows from `epochs`."""
    batch_size: int = Field(default=1, ge=1)
    """Rows per device and forward pass."""
    accumulation: int = Field(default=16, ge=1)
    """Forward passes per optimizer step."""
    max_length: int = Field(default=1024, ge=2)
    """Longest sample, in tokens; longer ones are left out and counted."""
    packing: bool = False
    """Fill each row with samples up to `max_length` tokens."""
    seed: int = 0

    bf16: bool = False
    """Compute in bfloat16; the trained weights stay float32 until they are saved."""
    gradient_checkpointing: bool = False

    limit: int | None = Field(default=None, ge=1)
    """Use that many samples, drawn with `seed`."""
    validation: float = Field(default=0.0, ge=0, lt=1)
    """Share of the samples that is kept from training to report a validation loss."""
    skip_bad: bool = False
    layout: LayoutSettings = LayoutSettings()

    save_steps: int = Field(default=200, ge=1)
    logging_steps: int = Field(default=10, ge=1)
    resume: bool = False
    """Go on from the last complete checkpoint in ``<out>.run``."""
    overwrite: bool = False

    @property
    def run_dir(self) -> Path:
        """Checkpoints, TensorBoard logs and the run's settings."""
        return self.out.with_name(f"{self.out.name}.run")
