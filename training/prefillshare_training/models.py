"""Loading a base and the decoder to be trained from it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import checkpoint
from prefillshare_server.models.geometry import Geometry
from prefillshare_training import attention, collator, objective
from prefillshare_training.samples import Sample, Turn

if TYPE_CHECKING:
    from pathlib import Path

    from prefillshare_training.settings import LoraSettings, TrainSettings

_PROBE = 8
_TOLERANCE = 1e-3


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
    geometry = Geometry.of(base_dir)
    _require_full_attention(base_dir, geometry)
    decoder = _load(base_dir, torch.float32)
    _attend(decoder, base_dir, geometry)
    if settings.lora is not None:
        decoder = _with_adapter(decoder, settings.lora)
        return Models(decoder, decoder if settings.method == "prefillshare" else None)
    if settings.method == "full-ft":
        return Models(decoder, None)
    base = _load(base_dir, torch.bfloat16 if settings.bf16 else torch.float32)
    attention.use(base)
    return Models(decoder, base.eval().requires_grad_(False))


def _load(directory: Path, dtype: torch.dtype) -> Any:
    checkpoint.require_weights(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    # The base's own, which is copied to the decoder, need not pass the checks of saving.
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model


def _attend(model: Any, base_dir: Path, geometry: Geometry) -> None:
    """Make `model` attend to KV of a base. Raises ConfigError unless it then says the same.

    On KV of its own weights it must. Models with layers of another kind than plain attention would
    go on without a part of the prompt, or without what is special about their attention.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # FSDP may have left this process's weights empty; the first one of the machine checks.
        attention.use(model)
        return
    prompt = tuple(range(1, _PROBE + 1))
    batch = collator.collate([[Sample((Turn(prompt, (0,)),))]])
    model.eval()
    with torch.no_grad():
        wanted = model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
        attention.use(model)
        try:
            kv = objective.base_kv(model, batch) or ()
            found = objective.shared_logits(model, batch, kv)[0, 0]
        except (RuntimeError, ValueError, TypeError, LookupError):
            kv, found = (), wanted
    shape = (1, geometry.num_kv_heads, _PROBE - 1, geometry.head_size)
    same = (found - wanted).abs().max() <= _TOLERANCE * wanted.abs().max()
    if not same or len(kv) != geometry.num_layers or any(key.shape != shape for key, _ in kv):
        raise ConfigError(
            Problem(
                str(base_dir),
                f"{type(model).__name__} cannot read the KV of a base",
                "use a base with plain attention in every layer, such as Llama or Qwen3",
            )
        )


def _with_adapter(model: Any, lora: LoraSettings) -> Any:
    # An adapter on one of two tied matrices cannot be merged without changing the other.
    tied = model.get_output_embeddings() if model.config.tie_word_embeddings else None
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not tied
    }
    if unknown := sorted(set(lora.targets) - linear):
        raise ConfigError(
            Problem(
                "lora.targets",
                f"the base has no linear layer of its own named {', '.join(unknown)}",
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


def _require_full_attention(base_dir: Path, geometry: Geometry) -> None:
    window = geometry.sliding_window
    if window is not None:
        raise ConfigError(
            Problem(
                str(base_dir),
                f"attends to a sliding window of {window} tokens",
                "use a base with full attention in every layer",
            )
        )
