"""Workers by fork: vLLM is imported once for all of them, and not again for a restart.

For CPU workers of one thread, as `vllm_plugin/engine_start.py`: neither CUDA nor a pool of threads
outlives a fork. Python's own fork server would serve the whole process with the environment of
this one, and would tell of a worker's end when its process id may be another's already.
"""

import asyncio
import ctypes
import json
import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from prefillshare_server.launch.plan import WorkerSpec
from prefillshare_server.vllm_plugin import WORKER_ENV
from prefillshare_server.vllm_plugin.engine_start import FORK_ENGINE_ENV
from prefillshare_server.vllm_plugin.zygote import READY

FORK_S = 10.0
"""For one fork, which takes some milliseconds."""

_MODULE = "prefillshare_server.vllm_plugin.zygote"
_POLL_S = 0.05
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def can_fork(spec: WorkerSpec) -> bool:
    """Whether the worker may start so."""
    return FORK_ENGINE_ENV in spec.env


class Forked:
    """A child that another process has forked for this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> None:
        """Reap it once it has ended."""
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class Zygote:
    """A process that has imported vLLM, or is about to. Ends with the thread that started it."""

    def __init__(self, spec: WorkerSpec, log: Path) -> None:
        """Start it, for workers whose environment means the same to what they import as `spec`'s.

        From now on this process adopts the orphans among its descendants. Raises OSError.
        """
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
        log.parent.mkdir(parents=True, exist_ok=True)
        # Not as a worker: the plug-in is none of its business.
        self._environment = {k: v for k, v in spec.environment.items() if k != WORKER_ENV}
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._orders, self._answers = process, process.stdin, process.stdout

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def ready(self) -> bool:
        """Wait until it can fork; False if it never will (its log says why)."""
        while not self._has_answered(0):
            await asyncio.sleep(_POLL_S)
        return self._answers.readline().decode().strip() == READY

    def fork(self, spec: WorkerSpec) -> Forked:
        """Start a worker that writes to the end of its log. Blocks for as long as a fork takes.

        Raises OSError when it cannot; then it never will again.
        """
        environment = spec.environment
        order = {
            "argv": spec.arguments,
            "log": str(spec.log),
            "set": dict(environment.items() - self._environment.items()),
            "unset": list(self._environment.keys() - environment.keys()),
        }
        try:
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()
            if not self._has_answered(FORK_S):
                raise OSError(f"no answer within {FORK_S:g} s")
            forked = Forked(int(self._answers.readline()))
            # Only now: a worker that nobody here knows of would never be stopped.
            self._orders.write(b"\n")
            self._orders.flush()
            return forked
        except (OSError, ValueError) as error:
            self.stop()
            raise OSError(f"the process that forks workers failed: {error}") from None

    def stop(self) -> None:
        """End it; the workers go on. Idempotent."""
        self._process.kill()
        self._process.wait()
        for stream in (self._orders, self._answers):
            with suppress(OSError):
                stream.close()

    def _has_answered(self, within_s: float) -> bool:
        return bool(select.select([self._answers], [], [], within_s)[0])
