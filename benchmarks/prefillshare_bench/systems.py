"""The systems that are compared, each started from nothing with the same workers, cores and KV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import yaml

from prefillshare_bench import stock
from prefillshare_bench.processes import ending_on_sigterm, serving, worker_urls
from prefillshare_bench.setting import Running as Running
from prefillshare_bench.setting import Setting as Setting
from prefillshare_bench.worker_state import Worker
from prefillshare_server.config import Cluster
from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import checkpoint

ROUTER_SYSTEMS = ("prefillshare", "per_model", "shared_pool", "predictive")
STOCK_SYSTEMS = ("aggregated", "multi_lora")
SYSTEMS = (*ROUTER_SYSTEMS, *STOCK_SYSTEMS)
"""PrefillShare first; the others are its baselines. Each is what cluster_files/<name>.yaml says."""
_HTTP_S = 30.0
_MANY = 1_000_000


@contextmanager
def start(name: str, setting: Setting, folder: Path) -> Iterator[Running]:
    """Start system `name` in `folder`, which gets its files and logs; stop all of it on leaving.

    SIGTERM counts as leaving. Raises ValueError for a name that is none, RuntimeError with the end
    of the log when something does not start, and ConfigError for a setting that cannot be served.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begin = _stock if name in STOCK_SYSTEMS else _routed
    with ending_on_sigterm(), begin(name, setting, folder) as running:
        yield running


def require_context(setting: Setting) -> None:
    """Raise ConfigError if the base cannot take prompts and answers as long as the workload's."""
    context = checkpoint.context_length(setting.base_dir)
    if setting.max_model_len > context:
        raise ConfigError(
            Problem(
                "the workload",
                f"needs {setting.max_model_len} tokens of context; {setting.base} has {context}",
                "give another --base, smaller lengths, or sessions with fewer calls",
            )
        )


@contextmanager
def _stock(name: str, setting: Setting, folder: Path) -> Iterator[Running]:
    system = stock.StockSystem.model_validate(_file(name))
    with stock.running(name, system, setting, folder) as running:
        (folder / "engines.yaml").write_text(running.cluster_file)
        yield running


@contextmanager
def _routed(name: str, setting: Setting, folder: Path) -> Iterator[Running]:
    file = folder / "cluster.yaml"
    with serving(cluster(name, setting), file) as (url, pid, ready_s):
        yield Running(
            name=name,
            urls=dict.fromkeys(setting.roles, (url,)),
            pids=(pid,),
            ready_s=ready_s,
            has_router=True,
            cluster_file=file.read_text(),
            places=router_workers(url, file.with_suffix(".log")),
        )


def cluster(name: str, setting: Setting) -> Cluster:
    """The cluster of a system with a router: its file, with base, roles and blocks of `setting`.

    Adapters are merged, so that each role has a decode worker with weights of its own. Raises
    ValueError and pydantic's ValidationError.
    """
    settings = _file(name)
    prefill = settings["prefill"]
    own = prefill.get("pool") == "per_role"
    filled = settings | {
        "base": {"model": setting.base},
        "roles": {
            role: {"adapter": str(setting.adapters[role]), "merge": True} for role in setting.roles
        },
        "prefill": prefill | {"replicas": 1 if own else len(setting.roles)},
        "kv": settings["kv"]
        | {"block_size": setting.block_size, "blocks": setting.kv_blocks // setting.workers},
        "max_model_len": setting.max_model_len,
        "dtype": setting.dtype,
    }
    if setting.max_sessions is not None:
        # As before stock vLLM, where the client keeps them waiting, none is refused.
        limit = {"max_sessions": setting.max_sessions, "session_queue": _MANY}
        filled["router"] = settings.get("router", {}) | limit
    return Cluster.model_validate(filled)


def router_workers(url: str, log: Path) -> tuple[Worker, ...]:
    """The workers behind the router at `url`, those that prefill first. `log` is the server's."""
    listed = httpx.get(f"{url}/v1/workers", timeout=_HTTP_S).raise_for_status().json()["data"]
    urls = worker_urls(log)
    return tuple(_worker(each, urls[each["id"]]) for each in listed)


def _worker(listed: Mapping[str, Any], url: str) -> Worker:
    info = httpx.get(f"{url}/prefillshare/info", timeout=_HTTP_S).raise_for_status().json()
    return Worker(listed["id"], listed["phase"], listed["pool"], url, info["block_bytes"])


def _file(name: str) -> dict[str, Any]:
    if name not in SYSTEMS:
        raise ValueError(f"{name!r} is no system; choose one of {', '.join(SYSTEMS)}")
    text = resources.files(__package__).joinpath("cluster_files", f"{name}.yaml").read_text()
    found: dict[str, Any] = yaml.safe_load(text)
    return found
