"""What all systems serve, and what a system that serves looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from prefillshare_bench.processes import family
from prefillshare_bench.worker_state import Sampler, Worker, WorkerState, settled
from prefillshare_server.launch.memory import kv_block_bytes
from prefillshare_server.models import checkpoint, store
from prefillshare_server.models.geometry import Geometry


@dataclass(frozen=True)
class Setting:
    """The same for every system that is compared. Raises ValueError for what cannot be divided."""

    base: str
    """Store name, directory, or hub id."""
    roles: tuple[str, ...]
    adapters: Mapping[str, Path]
    """By role; see adapters.py."""
    kv_blocks: int
    """Over all workers of a system."""
    block_size: int = 32
    """Tokens per KV block."""
    max_model_len: int = 4096
    """Tokens of a prompt and its answer."""
    max_sessions: int | None = None
    """Sessions that a router serves at once; the others wait. Without a router it has no effect."""

    def __post_init__(self) -> None:
        if not self.roles:
            raise ValueError("roles is empty; name at least one")
        if missing := [role for role in self.roles if role not in self.adapters]:
            raise ValueError(f"adapters has none for {', '.join(missing)}; draw one for each role")
        if self.kv_blocks % self.workers:
            near = round(self.kv_blocks / self.workers) * self.workers
            raise ValueError(
                f"kv_blocks is {self.kv_blocks}, which {self.workers} workers cannot have equal "
                f"parts of; set {near}"
            )

        # vLLM keeps one block of each worker for itself.
        fewest = self.workers * (-(-self.max_model_len // self.block_size) + 1)
        if self.kv_blocks < fewest:
            raise ValueError(
                f"kv_blocks is {self.kv_blocks}: of {self.workers} workers none can hold a request "
                f"of max_model_len {self.max_model_len} tokens; set at least {fewest}, or a "
                "smaller max_model_len"
            )

    @property
    def workers(self) -> int:
        """Of each system but multi_lora: two per role."""
        return 2 * len(self.roles)

    @property
    def base_dir(self) -> Path:
        """Where the base's files are. May take minutes on first use; raises ConfigError."""
        return store.resolve(self.base)

    @property
    def dtype(self) -> str:
        """Of weights and KV: the base's own."""
        return checkpoint.dtype(self.base_dir) or "bfloat16"

    @property
    def bytes_per_block(self) -> int:
        """Of one KV block, by the base's geometry."""
        return kv_block_bytes(Geometry.of(self.base_dir), self.dtype, self.block_size)


@dataclass(frozen=True)
class Running:
    """A system that serves."""

    name: str
    urls: Mapping[str, tuple[str, ...]]
    """By role: where its calls go. Of several, a session keeps to one."""
    pids: tuple[int, ...]
    """Of the processes that started all others."""
    ready_s: float
    """From nothing until all of it answers."""
    has_router: bool
    cluster_file: str
    """YAML of everything that was started; a run can be repeated from it."""
    places: tuple[Worker, ...]
    """Its workers, those that prefill first."""

    def workers(self) -> list[WorkerState]:
        """What they have computed, once the calls so far are over. Raises TimeoutError."""
        return settled(self.places)

    def sampler(self) -> Sampler:
        """A context manager that notes the most they hold at once."""
        return Sampler(self.places, self._processes())

    def memory_bytes(self) -> int:
        """Memory of all its processes now; what several share counts once (PSS)."""
        return sum(map(_pss, self._processes()))

    def _processes(self) -> Sequence[psutil.Process]:
        return [process for pid in self.pids for process in family(pid)]


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0
