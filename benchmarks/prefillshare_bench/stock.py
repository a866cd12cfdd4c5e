"""vLLM as it comes, without our plug-in: the systems that a router would not improve on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from prefillshare_bench.processes import Server, spawned
from prefillshare_bench.setting import Running, Setting
from prefillshare_bench.worker_state import Worker
from prefillshare_server.config_values import ArgValue
from prefillshare_server.launch.hardware import Hardware
from prefillshare_server.launch.memory import gpu_memory_utilization
from prefillshare_server.launch.ports import LOOPBACK, free_ports
from prefillshare_server.launch.vllm_args import to_argv
from prefillshare_server.models import adapter

_SERVER = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
_STARTS_AT_ONCE = 4


class StockSystem(BaseModel):
    """The file of such a system."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engines_per_role: int = Field(ge=0)
    """0: one engine with the adapters of all roles."""
    args: dict[str, ArgValue]
    """Arguments of each engine, as in a cluster file."""


@dataclass(frozen=True)
class Engine:
    """One engine to start."""

    id: str
    roles: tuple[str, ...]
    args: Mapping[str, ArgValue]
    """All of vLLM's arguments but host and port."""
    environment: Mapping[str, str]


@contextmanager
def running(name: str, system: StockSystem, setting: Setting, folder: Path) -> Iterator[Running]:
    """Start its engines, a few at a time: the start of each keeps a core busy.

    Raises RuntimeError with the end of the log of an engine that does not start, and ConfigError
    when an adapter cannot be merged.
    """
    planned = engines(system, setting)
    began = time.monotonic()
    servers: list[Server] = []
    with ExitStack() as stack:
        for batch in _batches(planned):
            for engine in batch:
                [port] = free_ports(1)
                argv = to_argv({"host": LOOPBACK, "port": port, **engine.args})
                url, log = f"http://{LOOPBACK}:{port}", folder / f"{engine.id}.log"
                servers.append(
                    stack.enter_context(spawned([*_SERVER, *argv], engine.environment, url, log))
                )
            for server in servers[-len(batch) :]:
                server.wait_until_healthy()
        try:
            yield _running(name, planned, servers, setting, time.monotonic() - began)
        finally:
            # All of them at once; below they are waited for one by one.
            for server in servers:
                server.process.terminate()


def _batches(planned: list[Engine]) -> list[list[Engine]]:
    hardware = Hardware.detect()
    # Engines that share a GPU must not measure its free memory while another takes some.
    size = min(hardware.cores, _STARTS_AT_ONCE) if hardware.on_cpu else 1
    return [planned[i : i + size] for i in range(0, len(planned), size)]


def _running(
    name: str, planned: list[Engine], servers: list[Server], setting: Setting, ready_s: float
) -> Running:
    urls: dict[str, tuple[str, ...]] = dict.fromkeys(setting.roles, ())
    workers = []
    for engine, server in zip(planned, servers, strict=True):
        for role in engine.roles:
            urls[role] = (*urls[role], server.url)
        only = engine.roles[0] if len(engine.roles) == 1 else None
        workers.append(
            Worker(engine.id, "colocated", only, server.url, setting.bytes_per_block, stock=True)
        )
    return Running(
        name=name,
        urls=urls,
        pids=tuple(server.pid for server in servers),
        ready_s=ready_s,
        has_router=False,
        cluster_file=_written_down(planned),
        places=tuple(workers),
    )


def engines(system: StockSystem, setting: Setting) -> list[Engine]:
    """The engines of a system, which share blocks, cores and GPUs equally. May merge adapters."""
    hardware = Hardware.detect()
    count = system.engines_per_role * len(setting.roles) or 1
    common: dict[str, ArgValue] = {
        "dtype": setting.dtype,
        "max-model-len": setting.max_model_len,
        "block-size": setting.block_size,
        "num-gpu-blocks-override": setting.kv_blocks // count,
    }
    if hardware.on_cpu:
        common |= {"enforce-eager": True, "distributed-executor-backend": "uni"}
    elif share := gpu_memory_utilization(hardware, workers=count):
        common["gpu-memory-utilization"] = share
    if not system.engines_per_role:
        every = {
            "model": str(setting.base_dir),
            "served-model-name": "base",
            **common,
            **system.args,
            "max-loras": len(setting.roles),
            "lora-modules": [f"{role}={setting.adapters[role]}" for role in setting.roles],
        }
        return [Engine("engine-0", setting.roles, every, _environment(hardware, 0, 1))]
    found: list[Engine] = []
    for role in setting.roles:
        merged = adapter.merged(setting.base_dir, setting.adapters[role])
        args = {"model": str(merged), "served-model-name": role, **common, **system.args}
        for replica in range(system.engines_per_role):
            environment = _environment(hardware, len(found), count)
            found.append(Engine(f"{role}-{replica}", (role,), args, environment))
    return found


def _environment(hardware: Hardware, index: int, count: int) -> dict[str, str]:
    """What our launcher sets for its workers too, see launch/plan.py, but no plug-in."""
    common = {"VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if not hardware.on_cpu:
        return common | ({"CUDA_VISIBLE_DEVICES": hardware.gpus_of(index)} if hardware.gpus else {})
    return common | {
        "OMP_NUM_THREADS": str(max(1, hardware.cores // count)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # As the launcher does: the engine runs the model itself, not in a third process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "GOMP_SPINCOUNT": "1000",
    }


def _written_down(planned: list[Engine]) -> str:
    listed: list[dict[str, Any]] = [
        {
            "id": engine.id,
            "roles": list(engine.roles),
            "args": dict(engine.args),
            "environment": dict(engine.environment),
        }
        for engine in planned
    ]
    return yaml.safe_dump({"engines": listed}, sort_keys=False, allow_unicode=True)
