"""The cluster of the soak: `prefillshare serve` in a process of its own, and how to break it."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from prefillshare_server.config import Cluster
from prefillshare_server.launch.ports import free_ports
from prefillshare_server.vllm_plugin import WORKER_ENV

ROLES = {"planner": "tiny-a", "solver": "tiny-b"}
START_S = 300
STOP_S = 60
_CLI = "from prefillshare_server.cli import main; main()"


class SoakCluster:
    """Started at once; ready after `started`."""

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        file = folder / "cluster.yaml"
        file.write_text(_cluster(port).to_yaml())
        self._output = folder / "output"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CLI, "serve", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    async def started(self) -> None:
        """Wait until the router serves."""
        async with asyncio.timeout(START_S):
            while f"{self.url} " not in self.output:
                self.require_running()
                await asyncio.sleep(0.2)

    def require_running(self) -> None:
        """Raise RuntimeError if the server has ended, with what it said last."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the server ended: {self.output[-2000:]}")

    def router_rss_mb(self) -> float:
        """Resident memory of the process with the router in it, workers not counted."""
        return float(psutil.Process(self._process.pid).memory_info().rss) / 1e6

    def kill_one(self, chance: random.Random) -> str:
        """SIGKILL to all processes of one worker, ready or not; returns its name."""
        workers = {
            name: child
            for child in psutil.Process(self._process.pid).children()
            if (name := _worker_name(child)) is not None
        }
        victim = chance.choice(sorted(workers))
        for process in [workers[victim], *workers[victim].children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return victim

    async def stop(self) -> None:
        """End it as Ctrl-C does."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGINT)
        await asyncio.to_thread(self._process.wait, STOP_S)


def _cluster(port: int) -> Cluster:
    # Random weights like blanks, and JSON may hold any number of them.
    grammars = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})
    return Cluster.model_validate(
        {
            "base": {"model": "tiny-base"},
            "prefill": {"replicas": 2},
            "roles": {role: {"model": model, "replicas": 2} for role, model in ROLES.items()},
            "decode": {"args": {"structured-outputs-config": grammars}},
            "dtype": "float32",
            "max_model_len": 2560,
            "kv": {"blocks": 256},
            "router": {"port": port},
            # The tiny decoders are drawn, not trained.
            "allow_untrained": True,
        }
    )


def _worker_name(process: psutil.Process) -> str | None:
    """Name of the worker whose API process this is; None for others and for one that has ended."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.environ().get(WORKER_ENV)
    return None
