"""From a cluster file to the workers to start; nothing is started here."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from prefillshare_server.config import LORA_POOL, Cluster
from prefillshare_server.config_values import ArgValue
from prefillshare_server.launch.decoders import (
    decoders,
    max_lora_rank,
    max_loras,
    weights_directory,
)
from prefillshare_server.launch.hardware import Hardware
from prefillshare_server.launch.memory import (
    cpu_blocks,
    gpu_memory_utilization,
    kv_block_bytes,
    require_room,
)
from prefillshare_server.launch.ports import LOOPBACK, free_ports
from prefillshare_server.launch.vllm_args import (
    PLUGIN,
    Args,
    Loras,
    SharedSettings,
    check_user_args,
    to_argv,
    worker_args,
)
from prefillshare_server.models import checkpoint, pooled_adapter, store
from prefillshare_server.router.topology import Phase, WorkerEndpoint
from prefillshare_server.vllm_plugin import COLOCATED_ENV, WORKER_ENV
from prefillshare_server.vllm_plugin.adapters import ADAPTERS_ENV
from prefillshare_server.vllm_plugin.contract import BaseContract
from prefillshare_server.vllm_plugin.engine_start import FORK_ENGINE_ENV
from prefillshare_server.vllm_plugin.worker import LAUNCHER_PID_ENV


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker to start."""

    name: str
    phase: Phase
    pool: str | None
    model: Path
    served_name: str
    port: int
    side_channel_port: int
    """Where NIXL serves the metadata of this worker's KV memory."""

    argv: tuple[str, ...]
    """vLLM's arguments without the port."""

    env: Mapping[str, str]
    """Added to the launcher's environment."""

    log: Path

    @property
    def arguments(self) -> list[str]:
        """Of `vllm_plugin/worker.py`. The port comes first: `ps` may cut off the end."""
        return ["--port", str(self.port), *self.argv]

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", f"{PLUGIN}.worker", *self.arguments]

    @property
    def environment(self) -> dict[str, str]:
        """Complete environment of the process, which must be started by this process."""
        return {
            **os.environ,
            **self.env,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
            LAUNCHER_PID_ENV: str(os.getpid()),
        }

    @property
    def endpoint(self) -> WorkerEndpoint:
        """As the router sees it, without the facts only the running worker knows."""
        url = f"http://{LOOPBACK}:{self.port}"
        return WorkerEndpoint(self.name, self.phase, self.pool, url, self.served_name)

    def on_new_ports(self) -> "WorkerSpec":
        port, side_channel_port = free_ports(2)
        return replace(self, port=port, side_channel_port=side_channel_port)


@dataclass(frozen=True, slots=True)
class _Pool:
    """Workers that differ in nothing but their ports."""

    phase: Phase
    name: str | None
    model: Path
    served_name: str
    replicas: int
    args: Mapping[str, ArgValue]
    loras: Loras | None = None

    @property
    def workers_name(self) -> str:
        """Ids of its workers are this and a number."""
        if self.phase == "colocated":
            return "engine"
        if self.phase == "decode":
            return self.name or ""
        return "prefill" if self.name is None else f"prefill-{self.name}"


_SPINNING = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}


def plan(
    cluster: Cluster, *, log_dir: Path, hardware: Hardware | None = None
) -> tuple[WorkerSpec, ...]:
    """Every worker of the cluster, prefill workers first.

    Builds, downloads or merges models that are not on disk yet, which may take minutes. Raises
    ConfigError.
    """
    hardware = hardware or Hardware.detect()
    pools = _pools(cluster)
    workers = sum(pool.replicas for pool in pools)
    settings = _shared_settings(cluster, pools[0].model, hardware, workers)
    ports = free_ports(2 * workers)
    specs: list[WorkerSpec] = []
    for pool in pools:
        args = worker_args(
            settings,
            phase=pool.phase,
            model=pool.model,
            served_name=pool.served_name,
            user_args=pool.args,
            loras=pool.loras,
        )
        for replica in range(pool.replicas):
            name = f"{pool.workers_name}-{replica}"
            specs.append(
                WorkerSpec(
                    name=name,
                    phase=pool.phase,
                    pool=pool.name,
                    model=pool.model,
                    served_name=pool.served_name,
                    port=ports.pop(),
                    side_channel_port=ports.pop(),
                    argv=tuple(to_argv(args)),
                    env=_environment(name, args, settings, hardware, len(specs), workers)
                    | (_adapters(pool) if pool.loras else {}),
                    log=log_dir / f"{name}.log",
                )
            )
    return tuple(specs)


def _pools(cluster: Cluster) -> list[_Pool]:
    check_user_args(cluster.prefill.args, "prefill.args")
    check_user_args(cluster.decode.args, "decode.args")
    base = store.resolve(cluster.base.model)
    speakers = decoders(cluster, base)
    name, args = cluster.base.name, cluster.prefill.args
    loras = None
    if cluster.has_lora_pool:
        check_user_args(cluster.lora_pool.args, "lora.args")
        loras = Loras(max_loras(cluster), max_lora_rank(cluster))
    if cluster.colocated:
        args = {**args, **cluster.decode.args, **cluster.lora_pool.args}
        return [_Pool("colocated", LORA_POOL, base, name, cluster.engines, args, loras)]
    owners = cluster.roles if cluster.prefill.pool == "per_role" else (None,)
    pools = [
        _Pool("prefill", owner, base, name, cluster.prefill.replicas, args) for owner in owners
    ]
    if loras is not None:
        args = {**cluster.decode.args, **cluster.lora_pool.args}
        pools.append(
            _Pool("decode", LORA_POOL, base, name, cluster.lora_pool.replicas, args, loras)
        )
    for role, decoder in speakers.items():
        if loras is not None and decoder.pool == LORA_POOL:
            continue
        settings = cluster.roles[role]
        check_user_args(settings.args, f"roles.{role}.args")
        model = weights_directory(settings, base)
        args = {**cluster.decode.args, **settings.args}
        pools.append(_Pool("decode", role, model, role, settings.replicas, args))
    return pools


def _shared_settings(
    cluster: Cluster, base_dir: Path, hardware: Hardware, workers: int
) -> SharedSettings:
    contract = BaseContract.of(
        base_dir,
        dtype=_dtype(cluster, base_dir),
        block_size=cluster.kv.block_size or (32 if hardware.on_cpu else 16),
        kv_cache_dtype=str(cluster.prefill.args.get("kv-cache-dtype", "auto")),
    )
    max_model_len = cluster.max_model_len or checkpoint.context_length(base_dir)
    blocks = cluster.kv.blocks
    if blocks is None and hardware.on_cpu:
        blocks = cpu_blocks(
            hardware,
            workers=workers,
            block_bytes=kv_block_bytes(contract.geometry, contract.dtype, contract.block_size),
            block_size=contract.block_size,
            max_model_len=max_model_len,
        )
    elif blocks is not None:
        require_room(blocks, block_size=contract.block_size, max_model_len=max_model_len)
    return SharedSettings(
        contract=contract,
        lease_s=cluster.kv.lease_s,
        clock_skew_s=cluster.kv.clock_skew_s,
        handoff_s=cluster.timeouts.handoff_s,
        max_model_len=max_model_len,
        on_cpu=hardware.on_cpu,
        blocks=blocks,
        gpu_memory_utilization=gpu_memory_utilization(hardware, workers=workers),
    )


def _dtype(cluster: Cluster, base_dir: Path) -> str:
    """One dtype for all workers. vLLM's own "auto" would turn fp32 checkpoints into 16 bits."""
    if cluster.dtype != "auto":
        return cluster.dtype
    return checkpoint.dtype(base_dir) or "bfloat16"


def _environment(
    name: str,
    args: Args,
    settings: SharedSettings,
    hardware: Hardware,
    index: int,
    workers: int,
) -> dict[str, str]:
    others = os.environ.get("VLLM_PLUGINS")
    env = {
        WORKER_ENV: name,
        "VLLM_PLUGINS": f"{others},prefillshare" if others else "prefillshare",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
        "VLLM_NO_USAGE_STATS": "1",
        # Models are directories by now: nothing is to be looked up on the hub.
        "HF_HUB_OFFLINE": "1",
    }
    if settings.on_cpu:
        threads = max(1, hardware.cores // workers)
        env |= {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Does not move the engine into the API process, but lets it run without a third one.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # GiB. Keeps vLLM from demanding nearly all memory; the number of blocks decides what
            # is allocated.
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        if threads == 1:
            env[FORK_ENGINE_ENV] = "1"
        elif not _SPINNING & os.environ.keys():
            # A thread that waits for another spins at first: for as long as the other has no core,
            # which it takes from it. A busy core would make the worker tens of times as slow.
            env["GOMP_SPINCOUNT"] = "1000"
    elif hardware.gpus:
        size = int(str(args.get("tensor-parallel-size", 1)))
        env["CUDA_VISIBLE_DEVICES"] = hardware.gpus_of(index, size)
    return env


def _adapters(pool: _Pool) -> dict[str, str]:
    return {
        ADAPTERS_ENV: str(pooled_adapter.home()),
        # An adapter is loaded when a request first names it.
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    } | ({COLOCATED_ENV: "1"} if pool.phase == "colocated" else {})
