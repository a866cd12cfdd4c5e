"""Writes a trained decoder: whole or not at all, and with its provenance."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prefillshare_server.models.provenance import Provenance

_COPIED = (
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "chat_template.*",
)
"""What makes a decoder speak the base's token ids; weights and config.json are its own."""

_SPARE_BYTES = 64 * 1024 * 1024


def write(
    model: Any, weights: dict[str, torch.Tensor], base_dir: Path, provenance: Provenance, out: Path
) -> None:
    """Write `model` with `weights` to the folder `out`, replacing it.

    A PeftModel is written as an adapter, any other model as a full checkpoint with the base's
    tokenizer and template. Weights are stored in the base's type. Raises ConfigError when the disk
    is full; then `out` is as it was.
    """
    dtype = getattr(torch, checkpoint.dtype(base_dir) or "float32")
    # A copy in any case: gathered shards may still be on their way into the tensor.
    cast = {name: tensor.detach().to("cpu", dtype, copy=True) for name, tensor in weights.items()}
    with _whole(out) as folder:
        if isinstance(model, PeftModel):
            model.save_pretrained(folder, state_dict=cast, save_embedding_layers=False)
            (folder / "README.md").unlink(missing_ok=True)
            # Not the folder it happens to have on this machine.
            _set(folder / "adapter_config.json", base_model_name_or_path=provenance.base)
        else:
            model.save_pretrained(folder, state_dict=cast)
            _set(folder / "config.json", dtype=str(dtype).removeprefix("torch."))
            for pattern in _COPIED:
                for file in base_dir.glob(pattern):
                    shutil.copyfile(file, folder / file.name)
        provenance.write(folder)


def size(model: Any, base_dir: Path) -> int:
    """Bytes that `write` will need, about."""
    dtype = getattr(torch, checkpoint.dtype(base_dir) or "float32")
    trained = isinstance(model, PeftModel)
    names = get_peft_model_state_dict(model) if trained else model.state_dict()
    return sum(tensor.numel() for tensor in names.values()) * dtype.itemsize


def require_space(folder: Path, needed: int) -> None:
    """Raise ConfigError unless the disk of `folder` (or its nearest parent) has `needed` bytes."""
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed + _SPARE_BYTES:
        raise ConfigError(
            Problem(
                str(folder),
                f"the disk has {free / 1e9:.1f} GB free, the run needs {needed / 1e9:.1f} GB",
                "free some space, or name another folder with --out",
            )
        )


@contextmanager
def disk_full_is_an_error(place: Path) -> Iterator[None]:
    """Turns a full disk, wherever it shows, into a ConfigError that says what is safe."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        # torch and safetensors report it as text.
        if not full and "No space left" not in str(error) and "os error 28" not in str(error):
            raise
        raise ConfigError(
            Problem(
                str(place),
                "the disk is full; nothing was left half-written",
                "free some space and run the command again with --resume",
            )
        ) from None


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its place when the block ends well."""
    # A link stays, and gets a new target.
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        with disk_full_is_an_error(out):
            yield folder
        folder.chmod(0o755)
        for file in folder.iterdir():
            file.chmod(0o644)
        take_place(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def take_place(folder: Path, out: Path) -> None:
    """Make `folder`, on the same disk, the new `out`; what `out` holds goes last."""
    out = out.resolve()
    before = folder.with_name(f"{folder.name}.before")
    if out.exists():
        out.rename(before)
    try:
        folder.rename(out)
    except OSError:
        if before.exists():
            before.rename(out)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _set(path: Path, **values: Any) -> None:
    config = {**json.loads(path.read_text(encoding="utf-8")), **values}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
