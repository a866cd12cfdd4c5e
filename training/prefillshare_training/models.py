"""Loading a base and the decoder to be trained from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import checkpoint
from prefillshare_server.models.geometry import Geometry
from prefillshare_training import attention

if TYPE_CHECKING:
    from pathlib import Path

    from prefillshare_training.settings import LoraSettings, TrainSettings


class Models(NamedTuple):
    """What a run trains, and what it conditions on."""

    decoder: Any
    """A PreTrainedModel, or a PeftModel."""
    base: Any
    """Frozen, in evaluation mode. With LoRA the decoder itself, whose adapter is off for the base
    pass; None for full-ft, which has no base pass."""


def load(base_dir: Path, settings: TrainSettings) -> Models:
    """The decoder, initialised as the base, and the base.

    The decoder's trained weights are float32. A second copy of the base, for full fine-tuning, is
    in the type that is computed in: float32, or bfloat16 with `settings.bf16`.
    """
    _require_full_attention(base_dir)
    if settings.lora is not None:
        decoder = _with_adapter(_load(base_dir, torch.float32), settings.lora)
        return Models(decoder, decoder if settings.method == "prefillshare" else None)
    decoder = _load(base_dir, torch.float32)
    if settings.method == "full-ft":
        return Models(decoder, None)
    base = _load(base_dir, torch.bfloat16 if settings.bf16 else torch.float32)
    return Models(decoder, base.eval().requires_grad_(False))


def _load(directory: Path, dtype: torch.dtype) -> Any:
    checkpoint.require_weights(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    attention.use(model)
    return model


def _with_adapter(model: Any, lora: LoraSettings) -> Any:
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    if unknown := sorted(set(lora.targets) - linear):
        raise ConfigError(
            Problem(
                "lora.targets",
                f"the base has no linear layer named {', '.join(unknown)}",
                f"choose from {', '.join(sorted(linear - {'lm_head'}))}",
            )
        )
    return get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=list(lora.targets),
        ),
    )


def _require_full_attention(base_dir: Path) -> None:
    window = Geometry.of(base_dir).sliding_window
    if window is not None:
        raise ConfigError(
            Problem(
                str(base_dir),
                f"attends to a sliding window of {window} tokens",
                "use a base with full attention in every layer",
            )
        )
