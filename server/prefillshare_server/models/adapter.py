"""A LoRA adapter becomes a full checkpoint: merged into its base once, and found again.

vLLM's decode workers serve full weights. The merge runs in fp32 and is saved in the base's type;
everything but the weights is the base's own, file by file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
from pathlib import Path

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import checkpoint, child, provenance, store, weights
from prefillshare_server.models.build_once import (
    Progress,
    build_once,
    disk_full,
    require_space,
    silent,
)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MERGE_TIMEOUT_S = 1800
_RECIPE = 1
"""Raised when the merged files change, so that older ones are merged again."""

# The base's tokenizer, template, configuration, and code of its own.
_COPIED = (".json", ".jinja", ".txt", ".model", ".py")
_NOT_COPIED = (provenance.FILE, store.RECIPE_FILE, CONFIG_FILE)
# The two must agree to rounding: peft adds the same products in another order.
_TOLERANCE = 1e-3


def home() -> Path:
    """Where merged checkpoints live; it need not exist yet."""
    return store.home().parent / "merged"


def merged(base_dir: Path, adapter_dir: Path, progress: Progress | None = None) -> Path:
    """The checkpoint of the base in `base_dir` with the LoRA adapter merged into it.

    Made on the first call, which takes memory for the base in fp32, and found on later ones.
    The adapter's `prefillshare.json` is copied along. Safe to call from several processes.
    Raises ConfigError when the adapter is none, damaged, or made for another shape of model, and
    when the disk is full.
    """
    require_lora(adapter_dir)
    require_shapes(base_dir, adapter_dir)
    notify = progress or silent
    target = home() / _key(base_dir, adapter_dir)

    def found() -> Path | None:
        return target if (target / "config.json").is_file() else None

    def write(directory: Path) -> None:
        notify(f"merge {adapter_dir} into {base_dir}")
        require_space(target, sum(path.stat().st_size for path in weights.files(base_dir)))
        _merge_in_child(base_dir, adapter_dir, directory)
        _copy_from_base(base_dir, directory)

    directory = build_once(target, write, found=found, progress=notify)
    _take_provenance(adapter_dir, directory)
    return directory


def require_lora(directory: Path) -> None:
    """Raise ConfigError unless `directory` has a whole LoRA adapter."""
    if not (directory / CONFIG_FILE).is_file():
        full = (directory / "config.json").is_file()
        raise ConfigError(
            Problem(
                str(directory),
                "is a full checkpoint, not an adapter" if full else f"has no {CONFIG_FILE}",
                "name it with `model:`" if full else "point to the folder that peft saved",
            )
        )
    config = checkpoint.read_json(directory / CONFIG_FILE)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(
            Problem(
                str(directory),
                f"is an adapter of type {kind}, not LORA",
                "merge it yourself, and name the result with `model:`",
            )
        )
    if config.get("alora_invocation_tokens"):
        raise ConfigError(
            Problem(
                str(directory),
                "is an activated LoRA, whose weights hold for a part of the prompt only",
                "train one with `prefillshare train --lora`",
            )
        )
    if not isinstance(config.get("r"), int) or config["r"] < 1:
        raise ConfigError(
            Problem(
                str(directory / CONFIG_FILE),
                f"has the rank (r) {config.get('r')!r}",
                "copy the file that peft saved, or train it again",
            )
        )
    if not (directory / WEIGHTS_FILE).is_file():
        raise ConfigError(
            Problem(str(directory), f"has no {WEIGHTS_FILE}", "copy it there, or train it again")
        )


def require_shapes(base_dir: Path, adapter_dir: Path) -> None:
    """Raise ConfigError for the first matrix that does not fit the base's.

    Modules whose name in the base's files is another one are left to peft.
    """
    found = weights.tensors(adapter_dir / WEIGHTS_FILE)
    base = weights.all_tensors(base_dir)
    for name, tensor in found.items():
        module, is_b, _ = name.partition(".lora_B.weight")
        down = found.get(f"{module}.lora_A.weight")
        target = base.get(f"{module.removeprefix('base_model.model.')}.weight")
        if not is_b or down is None or target is None:
            continue
        shape = (tensor.shape[0], down.shape[-1])
        if sorted(shape) != sorted(target.shape):
            ours, theirs = (" x ".join(map(str, each)) for each in (target.shape, shape))
            raise ConfigError(
                Problem(
                    str(adapter_dir),
                    f"was made for another model: {module.removeprefix('base_model.model.')} is "
                    f"{theirs}, the base's {ours}",
                    f"use an adapter of {base_dir}, or train one",
                )
            )


def _key(base_dir: Path, adapter_dir: Path) -> str:
    recipe = f"{_RECIPE} {provenance.base_fingerprint(base_dir)}".encode()
    return hashlib.sha256(recipe + content(adapter_dir)).hexdigest()[:16]


def content(adapter_dir: Path) -> bytes:
    """What its files hold, as a digest of each."""
    digests = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (adapter_dir / name).open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").digest())
    return b"".join(digests)


def _merge_in_child(base_dir: Path, adapter_dir: Path, directory: Path) -> None:
    command = [sys.executable, "-m", __name__, str(base_dir), str(adapter_dir), str(directory)]
    result = child.run(command, MERGE_TIMEOUT_S)
    if result.returncode == 0:
        return
    if os.strerror(errno.ENOSPC) in result.stderr:
        raise ConfigError(disk_full(directory))
    raise ConfigError(
        Problem(
            str(adapter_dir),
            f"cannot be merged into {base_dir} ({child.last_line(result.stderr)})",
            "use an adapter of this base, or merge it yourself and name the result with `model:`",
        )
    )


def _copy_from_base(base_dir: Path, directory: Path) -> None:
    for file in base_dir.iterdir():
        wanted = file.suffix in _COPIED and not file.name.endswith(".index.json")
        if wanted and file.name not in _NOT_COPIED and file.is_file():
            shutil.copyfile(file, directory / file.name)


def _take_provenance(adapter_dir: Path, directory: Path) -> None:
    """Evaluations may have been added to it since the merge."""
    source, copy = adapter_dir / provenance.FILE, directory / provenance.FILE
    if not source.is_file():
        copy.unlink(missing_ok=True)
    elif not copy.is_file() or copy.read_bytes() != source.read_bytes():
        provenance.replace_file(copy, source.read_bytes())


def merge(base_dir: Path, adapter_dir: Path, directory: Path) -> None:
    """Write the weights of base and adapter into `directory`; loads torch.

    Ends the process with one sentence when the merged model is not the adapted one.
    """
    import torch
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM, GenerationConfig

    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype="auto", local_files_only=True)
    dtype, tied = base.dtype, base.config.tie_word_embeddings
    given = weights.tensors(adapter_dir / WEIGHTS_FILE).keys()
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    for end in [name for name, module in base.named_modules() if module in ends and tied]:
        # Merging one of two tied matrices would change the other as well.
        if any(f".{end}." in name for name in given):
            raise SystemExit(f"it adapts {end}, which is tied to the other end of the model")
    model = PeftModel.from_pretrained(base.float(), adapter_dir).eval()
    # peft only warns of weights it has no place for, and of places it has no weights for.
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    if lost := sorted(given ^ loaded):
        raise SystemExit(f"{lost[0]} is only in {'the adapter' if lost[0] in given else 'peft'}")
    probe = torch.arange(32).remainder(base.config.vocab_size).unsqueeze(0)
    with torch.inference_mode():
        wanted = model(probe).logits
        plain = model.merge_and_unload(safe_merge=True)
        error = (plain(probe).logits - wanted).abs().max() / wanted.abs().max()
    if not error < _TOLERANCE or plain.config.tie_word_embeddings != tied:
        raise SystemExit("the merged model does not say what the adapted one says")
    # The base's own takes its place, which need not pass this version's checks.
    plain.generation_config = GenerationConfig()
    plain.to(dtype).save_pretrained(directory)
    for file in directory.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            file.unlink()


if __name__ == "__main__":
    merge(*map(Path, sys.argv[1:]))
