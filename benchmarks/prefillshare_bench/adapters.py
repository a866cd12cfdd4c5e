"""LoRA adapters whose weights are drawn: serving them costs what serving trained ones does."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from prefillshare_server.models import adapter, store, weights

RANK = 8
SEED = 0
SCALE = 2
"""`lora_alpha` over the rank."""
TARGETS = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The layers that examples/specialists train."""
_DEVIATION = 0.07
"""Of the drawn weights: so large that each adapter changes every answer in its own way, and small
enough that one token is still likelier than the others."""


def draw(base: str, folder: Path, roles: Sequence[str], *, seed: int = SEED) -> dict[str, Path]:
    """An adapter of `base` for each role, in a folder of `folder` that has the role's name.

    Files as peft saves them. A role's weights depend on its name and `seed` only, so those of more
    roles go on from those of fewer. Raises ConfigError when there is no such base.
    """
    base_dir = store.resolve(base)
    return {
        role: _write(base_dir, folder / role, [seed, zlib.crc32(role.encode())]) for role in roles
    }


def _write(base_dir: Path, directory: Path, seed: Sequence[int]) -> Path:
    chance = np.random.default_rng(seed)
    drawn = {}
    for name, tensor in sorted(weights.all_tensors(base_dir).items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS:
            rows, columns = tensor.shape
            for part, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
                values = chance.normal(scale=_DEVIATION, size=shape)
                drawn[f"base_model.model.{module}.{part}.weight"] = values.astype(np.float32)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_dir),
        "r": RANK,
        "lora_alpha": SCALE * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
        "inference_mode": True,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / adapter.CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    save_file(drawn, directory / adapter.WEIGHTS_FILE)
    return directory
