"""vLLM's command line for one worker.

The settings that make a handoff safe are fixed; users set anything else of vLLM through
`prefill.args`, `decode.args`, `lora.args` and `roles.<role>.args`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prefillshare_server.config_values import ArgValue
from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.launch.ports import LOOPBACK
from prefillshare_server.router.topology import Phase
from prefillshare_server.vllm_plugin.account import PARAMS_KEY
from prefillshare_server.vllm_plugin.contract import BaseContract

Args = dict[str, ArgValue]

PLUGIN = "prefillshare_server.vllm_plugin"

_KEPT_LORAS = 16
"""Adapters in a worker's memory, at least."""

_RESERVED = {
    "enable-lora": "give roles an adapter",
    "lora-modules": "set roles.<role>.adapter",
    "max-lora-rank": "set lora.max_lora_rank",
    "max-loras": "set lora.max_loras",
    "max-cpu-loras": "the launcher keeps more in memory than one batch has",
    "model": "set base.model or roles.<role>.model",
    "served-model-name": "set base.name, or name the role differently",
    "dtype": "set dtype, which is the same for all workers",
    "max-model-len": "set max_model_len, which is the same for all workers",
    "additional-config": "it carries what the base's KV must be",
    "block-size": "set kv.block_size, which is the same for all workers",
    "host": "workers listen on the loopback interface only",
    "port": "the launcher chooses free ports",
    "kv-transfer-config": "it carries the handoff of base KV",
    "scheduler-cls": "it keeps decoder KV out of the shared prefix cache",
    "worker-extension-cls": "it reports the size of a KV block",
}
"""vLLM arguments users must not set, and what to do instead (or why)."""


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """What all workers of a cluster have in common."""

    contract: BaseContract
    lease_s: int
    clock_skew_s: float
    handoff_s: float
    max_model_len: int
    on_cpu: bool
    blocks: int | None
    """KV blocks per worker; None leaves the choice to vLLM."""

    gpu_memory_utilization: float | None
    """Share of a GPU's memory per worker; None is vLLM's default."""


@dataclass(frozen=True, slots=True)
class Loras:
    """Room for adapters on a worker that they share."""

    most: int
    """In one batch."""
    max_rank: int


def check_user_args(args: Mapping[str, ArgValue], where: str) -> None:
    """Raise ConfigError for arguments that the launcher sets itself."""
    problems = [
        Problem(f"{where}.{name}", "is set by the launcher", _RESERVED[name])
        for name in args
        if name in _RESERVED
    ]
    if problems:
        raise ConfigError(*problems)


def worker_args(
    settings: SharedSettings,
    *,
    phase: Phase,
    model: Path,
    served_name: str,
    user_args: Mapping[str, ArgValue],
    loras: Loras | None = None,
) -> Args:
    """Every argument but the port; user arguments win over defaults."""
    check_user_args(user_args, f"args of {served_name}")
    contract = settings.contract
    args: Args = {
        "model": str(model),
        "served-model-name": served_name,
        "host": LOOPBACK,
        "dtype": contract.dtype,
        "max-model-len": settings.max_model_len,
        "block-size": contract.block_size,
        "enable-prefix-caching": True,
        "enable-prompt-tokens-details": True,
        "disable-uvicorn-access-log": True,
        "worker-extension-cls": f"{PLUGIN}.kv_info.KVInfo",
    }
    if settings.on_cpu:
        # One process less than with vLLM's default executor, see also plan.py.
        args |= {"distributed-executor-backend": "uni", "enforce-eager": True}
    if settings.blocks is not None:
        args["num-gpu-blocks-override"] = settings.blocks
    if settings.gpu_memory_utilization is not None:
        args["gpu-memory-utilization"] = settings.gpu_memory_utilization
    if phase == "colocated":
        args["additional-config"] = json.dumps({PARAMS_KEY: contract.to_dict()})
    else:
        args["kv-transfer-config"] = json.dumps(_kv_transfer_config(settings, phase))
    if phase != "prefill":
        args |= {
            "scheduler-cls": f"{PLUGIN}.{_scheduler(phase, settings.on_cpu)}",
            "enable-auto-tool-choice": True,
            "tool-call-parser": "hermes",
        }
    if loras is not None:
        args |= {
            "enable-lora": True,
            "max-loras": loras.most,
            # Those that wait for their turn need not be read from disk again.
            "max-cpu-loras": max(loras.most, _KEPT_LORAS),
            "max-lora-rank": loras.max_rank,
        }
    return {**args, **user_args}


def _scheduler(phase: Phase, on_cpu: bool) -> str:
    if phase == "colocated":
        return "colocated.ColocatedScheduler" if on_cpu else "colocated.ColocatedAsyncScheduler"
    return "scheduler.PrefillShareScheduler" if on_cpu else "scheduler.PrefillShareAsyncScheduler"


def _kv_transfer_config(settings: SharedSettings, phase: Phase) -> dict[str, object]:
    extra: dict[str, object] = {
        # The hash contains the model's path: it refuses every specialist. Our contract is stricter.
        "enforce_handshake_compat": False,
        "kv_lease_duration": settings.lease_s,
        # Below this many tokens vLLM would compute the prompt locally: with decoder weights.
        "kv_recompute_threshold": 0,
        # Would send the decoder's KV into the base's cache.
        "bidirectional_kv_xfer": False,
        "clock_skew_s": settings.clock_skew_s,
        "handoff_s": settings.handoff_s,
        PARAMS_KEY: settings.contract.to_dict(),
    }
    if settings.on_cpu:
        extra["num_threads"] = 0
    return {
        "kv_connector": "PrefillShareConnector",
        "kv_connector_module_path": f"{PLUGIN}.connector",
        "kv_role": "kv_producer" if phase == "prefill" else "kv_consumer",
        "kv_load_failure_policy": "fail",
        "kv_buffer_device": "cpu" if settings.on_cpu else "cuda",
        "kv_connector_extra_config": extra,
    }


def to_argv(args: Mapping[str, ArgValue]) -> list[str]:
    """`{"max-num-seqs": 8, "enforce-eager": True}` → `--max-num-seqs 8 --enforce-eager`."""
    argv: list[str] = []
    for name, value in args.items():
        if value is True:
            argv.append(f"--{name}")
        elif value is False:
            argv.append(f"--no-{name}")
        elif isinstance(value, list):
            argv += [f"--{name}", *value]
        else:
            argv += [f"--{name}", str(value)]
    return argv
