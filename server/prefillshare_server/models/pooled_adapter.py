"""A LoRA adapter that a decode worker serves beside others, over one copy of the base's weights.

It is copied under a name made of its content. So what is served does not change with the folder it
came from, and an adapter that replaces another has another name everywhere.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import checkpoint, store, weights
from prefillshare_server.models.adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    content,
    require_lora,
    require_shapes,
)
from prefillshare_server.models.build_once import build_once, require_space, silent

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `max_lora_rank`."""

_MERGE = "set merge: true for the role, which then gets workers of its own"
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of init_lora_weights that leave the base's weights alone."""


def home() -> Path:
    """Where the copies live; it need not exist yet."""
    return store.home().parent / "adapters"


def pooled(base_dir: Path, adapter_dir: Path) -> str:
    """The name of the adapter in `adapter_dir`; its copy is the folder of that name in `home`.

    Copied on the first call. Safe to call from several processes. Raises ConfigError when the
    adapter is none, damaged, made for another shape of model, or of a kind that cannot share a
    worker, and when the disk is full.
    """
    require_lora(adapter_dir)
    # Before the other checks: with the digest of the copy it says that they hold for the copy.
    name = _digest(adapter_dir)
    require_shapes(base_dir, adapter_dir)
    if problems := list(_unshareable(adapter_dir)):
        raise ConfigError(*problems)
    _require_modules(base_dir, adapter_dir)
    target = home() / name

    def found() -> Path | None:
        return target if (target / WEIGHTS_FILE).is_file() else None

    def write(directory: Path) -> None:
        require_space(target, (adapter_dir / WEIGHTS_FILE).stat().st_size)
        for file in (WEIGHTS_FILE, CONFIG_FILE):
            shutil.copyfile(adapter_dir / file, directory / file)
        if _digest(directory) != name:
            raise ConfigError(
                Problem(str(adapter_dir), "changed while it was read", "try again when it is whole")
            )

    build_once(target, write, found=found, progress=silent)
    return name


def rank(adapter_dir: Path) -> int:
    """Its largest rank."""
    config = checkpoint.read_json(adapter_dir / CONFIG_FILE)
    return max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])


def max_rank(ranks: Iterable[int]) -> int:
    """The smallest `max_lora_rank` of vLLM's that holds all `ranks`. Raises ConfigError."""
    largest = max(ranks, default=1)
    for possible in RANKS:
        if possible >= largest:
            return possible
    raise ConfigError(Problem(f"rank {largest}", f"vLLM serves ranks up to {RANKS[-1]}", _MERGE))


def _require_modules(base_dir: Path, adapter_dir: Path) -> None:
    """Raise ConfigError for the first module that the base does not have: vLLM would ignore it.

    Modules of a multimodal base, which has several names for them, are left to vLLM.
    """
    if "text_config" in checkpoint.read_json(base_dir / "config.json"):
        return
    if any(file.suffix != ".safetensors" for file in weights.files(base_dir)):
        return
    # Not by `.weight`: quantised weights have other names.
    modules = {name.rpartition(".")[0] for name in weights.all_tensors(base_dir)}
    found = weights.tensors(adapter_dir / WEIGHTS_FILE).keys()
    for name in sorted(found):
        module, half, _ = name.removeprefix("base_model.model.").partition(".lora_")
        if not half or not name.endswith(".weight"):
            continue
        there, elsewhere = ".lora_A.", ".lora_B."
        if there not in name:
            there, elsewhere = elsewhere, there
        if module == "lm_head" and module not in modules:
            what = "adapts lm_head, which the base shares with its embedding"
        elif module not in modules:
            what = f"was made for another model: it adapts {module}, which the base does not have"
        elif name.replace(there, elsewhere) not in found:
            what = f"is damaged: it has {name} and not the other half"
        else:
            continue
        raise ConfigError(
            Problem(str(adapter_dir), what, f"use an adapter of {base_dir}, or train one")
        )


def _unshareable(adapter_dir: Path) -> Iterator[Problem]:
    """What vLLM cannot apply beside the base's weights, and refuses, or does not notice."""
    config = checkpoint.read_json(adapter_dir / CONFIG_FILE)

    def problem(what: str) -> Problem:
        return Problem(str(adapter_dir), f"cannot share a decode worker: {what}", _MERGE)

    for key in ("use_dora", "use_qalora", "use_bdlora", "lora_bias", "layer_replication"):
        if config.get(key):
            yield problem(f"{key} is {config[key]!r}")
    if config.get("bias", "none") != "none":
        yield problem(f"bias is {config['bias']!r}")
    for key in ("modules_to_save", "trainable_token_indices"):
        if config.get(key):
            yield problem(f"it has full weights of its own ({key}: {_listed(config[key])})")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        yield problem(f"init_lora_weights {start!r} changes the base's weights")
    if any("lora_embedding_" in name for name in weights.tensors(adapter_dir / WEIGHTS_FILE)):
        yield problem("it adapts the embedding")


def _listed(value: Any) -> str:
    return ", ".join(map(str, value))


def _digest(adapter_dir: Path) -> str:
    return f"adapter-{hashlib.sha256(content(adapter_dir)).hexdigest()[:16]}"
