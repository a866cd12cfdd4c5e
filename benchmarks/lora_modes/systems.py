"""The systems that are compared, each started from nothing with the same cores and KV memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from prefillshare_server.config import Cluster
from prefillshare_server.launch.hardware import Hardware
from prefillshare_server.launch.ports import free_ports
from prefillshare_server.models import checkpoint, store
from tests.served import serve_in_thread

BLOCK = 32
"""Tokens per KV block."""
RANK = 8
START_S = 600
STOP_S = 60
LONGEST = 8192
"""Tokens of a prompt and its answer, if the base can have so many."""


@dataclass(frozen=True)
class Running:
    """A system that serves."""

    url: str
    ready_s: float
    """From nothing to the first call."""
    blocks_in_use: Callable[[], int]
    """KV blocks that running calls hold, over all workers."""
    processes: Callable[[], list[psutil.Process]]

    def rss_mb(self) -> float:
        """Memory of all its processes; what they share counts once."""
        return sum(process.memory_full_info().pss for process in self.processes()) / 2**20


Start = Callable[["Setting", Path], Any]


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
    environment = os.environ | {"VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    if Hardware.detect().on_cpu:
        command += ["--enforce-eager", "--distributed-executor-backend", "uni"]
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(os.cpu_count()),
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
    started = time.monotonic()
    with (folder / "stock.log").open("wb") as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while not _answers(f"{url}/health"):
            if server.poll() is not None or time.monotonic() > started + START_S:
                said = "".join(Path(log.name).read_text().splitlines(keepends=True)[-20:])
                raise RuntimeError(f"stock vLLM does not start:\n{said}")
            time.sleep(0.2)

        def in_use() -> int:
            share = _metric(httpx.get(f"{url}/metrics").text, "vllm:kv_cache_usage_perc")
            return round(share * (setting.blocks - 1))

        yield Running(url, time.monotonic() - started, in_use, lambda: _family(server.pid))
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _ours(name: str, changes: Callable[[Setting], Mapping[str, Any]]) -> Start:
    @contextmanager
    def start(setting: Setting, folder: Path) -> Iterator[Running]:
        cluster = Cluster.model_validate(
            {
                "base": {"model": setting.base},
                "kv": {"block_size": BLOCK},
                "max_model_len": setting.max_model_len,
                # The adapters are drawn, not trained.
                "allow_untrained": True,
                "timeouts": {"start_s": START_S, "queue_s": START_S},
            }
            | dict(changes(setting))
        )
        started = time.monotonic()
        with serve_in_thread(cluster, log_dir=folder / name) as served:

            def in_use() -> int:
                states = [httpx.get(f"{w.url}/prefillshare/state").json() for w in served.workers]
                # vLLM keeps one block of each worker for itself.
                return sum(s["num_blocks"] - 1 - s["free_blocks"] for s in states)

            # The router's part is in this process.
            yield Running(
                served.url,
                time.monotonic() - started,
                in_use,
                lambda: psutil.Process().children(recursive=True),
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


def write_adapters(base: str, folder: Path, roles: Sequence[str]) -> dict[str, Path]:
    """Adapters of the form of examples/specialists. Drawn weights cost what trained ones do."""
    from transformers.utils import logging

    from tests.adapters import write_adapter

    logging.disable_progress_bar()
    layers = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    base_dir = store.resolve(base)
    return {
        role: write_adapter(base_dir, folder / role, seed=seed, rank=RANK, targets=layers)
        for seed, role in enumerate(roles)
    }


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _metric(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]
