"""The systems that are compared, each started from nothing with the same cores and KV memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from prefillshare_bench.adapters import RANK
from prefillshare_bench.processes import START_S, family, serving, started
from prefillshare_bench.systems import router_workers
from prefillshare_bench.worker_state import read
from prefillshare_server.config import Cluster
from prefillshare_server.launch.hardware import Hardware
from prefillshare_server.launch.ports import free_ports
from prefillshare_server.models import checkpoint, store

BLOCK = 32
"""Tokens per KV block."""
LONGEST = 8192
"""Tokens of a prompt and its answer, if the base can have so many."""


@dataclass(frozen=True)
class Running:
    """A system that serves."""

    url: str
    ready_s: float
    """From nothing until it answers /health; ours has then answered calls of its own."""
    blocks_in_use: Callable[[], int]
    """KV blocks that running calls hold, over all workers."""
    pid: int
    """Of the process that started all others."""

    def rss_mb(self) -> float:
        """Memory of all its processes; what they share counts once."""
        return sum(process.memory_full_info().pss for process in family(self.pid)) / 2**20


Start = Callable[["Setting", Path], AbstractContextManager[Running]]


@dataclass(frozen=True)
class Setting:
    """What all systems serve."""

    base: str
    adapters: Mapping[str, Path]
    """By role."""
    blocks: int
    """KV blocks over all workers of a system; of two kinds of workers, each kind has half."""

    @property
    def max_model_len(self) -> int:
        """In tokens."""
        return min(LONGEST, checkpoint.context_length(store.resolve(self.base)))


@contextmanager
def stock(setting: Setting, folder: Path) -> Iterator[Running]:
    """vLLM as it comes, with all adapters on one engine: what a user would pick today."""
    base_dir, [port] = store.resolve(setting.base), free_ports(1)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(base_dir), "--served-model-name", "base"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", checkpoint.dtype(base_dir) or "bfloat16"),
        *("--max-model-len", str(setting.max_model_len), "--block-size", str(BLOCK)),
        *("--num-gpu-blocks-override", str(setting.blocks)),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--enable-lora", "--max-loras", str(len(setting.adapters)), "--max-lora-rank", str(RANK)),
        "--lora-modules",
        *(f"{role}={path}" for role, path in setting.adapters.items()),
    ]
    environment = {"VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    if Hardware.detect().on_cpu:
        command += ["--enforce-eager", "--distributed-executor-backend", "uni"]
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(os.cpu_count()),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # As our launcher does; the default is far slower beside whoever sends the calls.
            "GOMP_SPINCOUNT": "1000",
        }
    url = f"http://127.0.0.1:{port}"
    with started(command, environment, url, folder / "stock.log") as (pid, ready_s):

        def in_use() -> int:
            share = _metric(httpx.get(f"{url}/metrics").text, "vllm:kv_cache_usage_perc")
            return round(share * (setting.blocks - 1))

        yield Running(url, ready_s, in_use, pid)


def _ours(name: str, changes: Callable[[Setting], Mapping[str, Any]]) -> Start:
    @contextmanager
    def start(setting: Setting, folder: Path) -> Iterator[Running]:
        settings = {
            "base": {"model": setting.base},
            "kv": {"block_size": BLOCK},
            "max_model_len": setting.max_model_len,
            # The adapters are drawn, not trained.
            "allow_untrained": True,
            "timeouts": {"start_s": START_S, "queue_s": START_S, "first_token_s": START_S},
        } | dict(changes(setting))
        file = folder / f"{name}.yaml"
        with serving(Cluster.model_validate(settings), file) as (url, pid, ready_s):
            workers = router_workers(url, file.with_suffix(".log"))
            yield Running(
                url, ready_s, lambda: sum(each.blocks_in_use for each in read(workers)), pid
            )

    return start


def _adapters(setting: Setting, **options: Any) -> dict[str, Any]:
    return {role: {"adapter": str(path), **options} for role, path in setting.adapters.items()}


def _one_engine(setting: Setting) -> dict[str, Any]:
    return {"mode": "colocated", "roles": _adapters(setting), "prefill": _blocks(setting.blocks)}


def _lora_pool(setting: Setting) -> dict[str, Any]:
    half = _blocks(setting.blocks // 2)
    return {"roles": _adapters(setting), "prefill": half, "lora": half}


def _worker_per_role(setting: Setting) -> dict[str, Any]:
    half = setting.blocks // 2
    each = _blocks(half // len(setting.adapters))
    return {"roles": _adapters(setting, merge=True, **each), "prefill": _blocks(half)}


def _blocks(count: int) -> dict[str, Any]:
    return {"args": {"num-gpu-blocks-override": count}}


SYSTEMS: Mapping[str, Start] = {
    "stock": stock,
    "one_engine": _ours("one_engine", _one_engine),
    "lora_pool": _ours("lora_pool", _lora_pool),
    "worker_per_role": _ours("worker_per_role", _worker_per_role),
}


LABELS = {
    "stock": "stock vLLM, all adapters on one engine",
    "one_engine": "mode: colocated",
    "lora_pool": "prefill + one worker for all adapters",
    "worker_per_role": "prefill + a worker per role, merged",
}


def _metric(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))
