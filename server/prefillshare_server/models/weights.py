"""A checkpoint's weight files, read without torch: what is in them, and whose they are."""

from __future__ import annotations

import filecmp
import hashlib
import json
import struct
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from prefillshare_server.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SAMPLE_BYTES = 4096
_SAMPLES_OF_OTHER_FORMATS = 256
_LONGEST_HEADER = 100 << 20


class Tensor(NamedTuple):
    """Where a tensor lies in its file."""

    dtype: str
    """As safetensors names it: ``F32``, ``BF16``, …"""
    shape: tuple[int, ...]
    start: int
    end: int


def files(directory: Path) -> list[Path]:
    """Every weight file of a checkpoint, by name."""
    found = [*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")]
    return sorted(found, key=lambda path: path.name)


def tensors(file: Path) -> dict[str, Tensor]:
    """The header of a safetensors file. Raises ConfigError when the file is damaged or cut off."""
    try:
        with file.open("rb") as opened:
            return _header(opened, file.stat().st_size)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        reason = getattr(error, "strerror", None) or "its header does not describe it"
        raise ConfigError(
            Problem(
                str(file),
                f"is damaged or no safetensors file ({reason})",
                "copy, download or train it again",
            )
        ) from None


def all_tensors(directory: Path) -> dict[str, Tensor]:
    """Those of every safetensors file of a checkpoint. Raises ConfigError for a damaged file."""
    found: dict[str, Tensor] = {}
    for file in files(directory):
        if file.suffix == ".safetensors":
            found |= tensors(file)
    return found


def digest(directory: Path) -> str:
    """Fingerprint of a checkpoint's weights: 16 hex digits.

    Over name, type, shape and 4 KiB of every tensor, so that it takes milliseconds; training
    changes a tensor throughout. Raises ConfigError for a damaged file.
    """
    found = hashlib.sha256()
    for path in files(directory):
        for sample in _samples(path):
            found.update(sample)
    return found.hexdigest()[:16]


def identical(one: Path, other: Path) -> bool:
    """Whether two checkpoints have the same weight files, byte for byte.

    Reads them whole unless they are one file, or their samples differ already.
    """
    ours, theirs = files(one), files(other)
    if not ours or [path.name for path in ours] != [path.name for path in theirs]:
        return False
    pairs = list(zip(ours, theirs, strict=True))
    if all(a.samefile(b) for a, b in pairs):
        return True
    return digest(one) == digest(other) and all(filecmp.cmp(a, b, shallow=False) for a, b in pairs)


def _header(opened: BinaryIO, size: int) -> dict[str, Tensor]:
    (length,) = struct.unpack("<Q", opened.read(8))
    if length > min(size, _LONGEST_HEADER):
        raise ValueError("longer than the file")
    raw: dict[str, Any] = json.loads(opened.read(length))
    found: dict[str, Tensor] = {}
    for name, entry in raw.items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + int(offset) for offset in entry["data_offsets"])
        if not 8 + length <= start <= end <= size:
            raise ValueError("a tensor outside the file")
        found[name] = Tensor(str(entry["dtype"]), tuple(entry["shape"]), start, end)
    return found


def _samples(path: Path) -> Iterator[bytes]:
    if path.suffix == ".safetensors":
        listed = sorted(tensors(path).items())
    else:
        size = path.stat().st_size
        step = max(1, size // _SAMPLES_OF_OTHER_FORMATS)
        listed = [(path.name, Tensor("", (size,), at, size)) for at in range(0, size, step)]
    with path.open("rb") as file:
        for name, (dtype, shape, start, end) in listed:
            yield f"{name} {dtype} {shape}\n".encode()
            # From the middle: the first rows of an embedding often stay as they were.
            file.seek(start + max(0, end - start - _SAMPLE_BYTES) // 2)
            yield file.read(min(_SAMPLE_BYTES, end - start))
