"""LoRA adapters of tiny-base whose weights are drawn: each changes every answer, in its own way."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_adapter(
    base_dir: Path,
    directory: Path,
    *,
    seed: int = 7,
    rank: int = 4,
    targets: Sequence[str] = ("q_proj", "o_proj", "down_proj"),
    **options: Any,
) -> Path:
    """An adapter as peft saves it; `options` are more of `LoraConfig`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(base_dir)
    options = {"lora_alpha": 2 * rank, **options}
    lora = LoraConfig(r=rank, target_modules=list(targets), **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(base, lora)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    return directory
