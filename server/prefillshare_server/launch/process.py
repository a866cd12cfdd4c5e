"""One worker as a process group: start, watch, stop, and the reason when it fails."""

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

import psutil

from prefillshare_server.launch.plan import WorkerSpec
from prefillshare_server.launch.zygote import Zygote

State = Literal["starting", "loading", "warming", "ready", "failed", "died"]
OnEvent = Callable[[str, State, str], None]
"""Called in the cluster's event loop with worker, state and a detail for people."""

STOP_TIMEOUT_S = 10.0
STOP_STARTING_TIMEOUT_S = 1.0
"""vLLM does not answer SIGTERM while its engine starts, and has nothing to save then."""

TRACKER_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 30.0
_POLL_S = 0.05
_TAIL_BYTES = 256 * 1024

LONGEST_LOG = 8 * 1024**2
"""Bytes. A restart begins a new log when the one so far is longer, and keeps that one aside."""

_OURS = re.compile(r"prefillshare: .*")
_BAD_ARGUMENT = re.compile(r"^worker\.py: error: (.+(?:\n .+)*)", re.MULTILINE)
_PORT_TAKEN = re.compile(r"[Aa]ddress already in use")
_EXCEPTION = re.compile(r"(?:^|\s)[\w.]*?(\w*(?:Error|Exception|Interrupt)): (.+)")
_WRAPPERS = ("Engine core initialization failed", "EngineCore encountered an issue")
"""vLLM's API process says this when its engine process failed: the reason stands before it."""

_ENGINE_KILLED = "engine core exited unexpectedly"
_ENGINE_FAILED = "EngineCore encountered a fatal error"


class WorkerFailedError(RuntimeError):
    """A worker did not start or ended unasked."""

    def __init__(self, spec: WorkerSpec, reason: str) -> None:
        super().__init__(f"worker {spec.name} failed: {reason}\n  log: {spec.log}")
        self.worker = spec.name
        self.reason = reason
        self.log = spec.log


class WorkerProcess:
    """A started worker; its processes form one process group."""

    def __init__(self, spec: WorkerSpec, *, restart: int = 0, zygote: Zygote | None = None) -> None:
        """Start it. Call from a thread that lives as long as the worker: see lifetime.py.

        `restart` counts the starts before this one, whose log is kept. With a `zygote` it is forked
        there. Raises OSError.
        """
        self.spec = spec
        self.restart = restart
        self.serving = False
        """Whether it has answered: such a worker gets time to stop."""
        self._stopped = False
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        if restart:
            _set_aside_if_long(spec.log)
        with spec.log.open("ab" if restart else "wb") as log:
            if restart:
                log.write(
                    f"\n===== {time.ctime()}: restart {restart} of {spec.name} =====\n".encode()
                )
                log.flush()
            self._log_start = log.tell()
            self._process = zygote.fork(spec) if zygote is not None else _started(spec, log)

    @property
    def pid(self) -> int:
        """Process id of the API process, and id of the process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        return not self._stopped and self._exit() is None

    @property
    def log_tail(self) -> str:
        """The end of what it logged since this start; nothing if somebody took the log away."""
        try:
            with self.spec.log.open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    @property
    def failed_on_port(self) -> bool:
        return _PORT_TAKEN.search(self.log_tail) is not None

    def failure(self) -> WorkerFailedError:
        """Why it ended, in one line. Call before `stop`."""
        ended = self._exit()
        if ended is not None and ended.si_code != os.CLD_EXITED:
            name = signal.Signals(ended.si_status).name
            hint = "; is there enough memory?" if name == "SIGKILL" else ""
            # Whatever stands in its log did not end it.
            return WorkerFailedError(self.spec, f"it was killed by {name}{hint}")
        status = ended and ended.si_status
        reason = reason_in(self.log_tail) or f"it ended with status {status}"
        return WorkerFailedError(self.spec, reason)

    async def stop(self, timeout_s: float | None = None) -> None:
        """SIGTERM, then SIGKILL after `timeout_s`; returns when no process of it is left.

        Raises WorkerFailedError when some outlive even that, as in a call of a broken driver.
        """
        if self._stopped:
            return
        if timeout_s is None:
            timeout_s = STOP_TIMEOUT_S if self.serving else STOP_STARTING_TIMEOUT_S
        family = self._family()
        if self.running:
            os.kill(self.pid, signal.SIGTERM)
        if not await self._gone_within(timeout_s, family):
            self._kill([process for process in family if not _is_resource_tracker(process)])
            # Python's resource tracker outlives what it tracks to remove semaphores left behind.
            await self._gone_within(TRACKER_TIMEOUT_S, family)
        self._kill(family)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not await self._gone_within(KILL_TIMEOUT_S, family):
            left = [process.pid for process in family if _alive([process])]
            left += [self.pid] if self.running else []
            raise WorkerFailedError(self.spec, f"processes of it outlive SIGKILL: {left}")
        self._process.wait()
        # Also what it forked after `family` was listed.
        while _reaped_one_of(self.pid):
            pass
        self._stopped = True

    def _kill(self, family: list[psutil.Process]) -> None:
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    async def _gone_within(self, timeout_s: float, family: list[psutil.Process]) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.running or _alive(family):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def _exit(self) -> os.waitid_result | None:
        """How it ended; None before.

        Without reaping it: a zombie keeps its process id, so that a signal to the process group
        cannot reach a stranger.
        """
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def _family(self) -> list[psutil.Process]:
        """Its other processes, also those left when the API process, their parent, ended."""
        family = set()
        with suppress(psutil.NoSuchProcess):
            family.update(psutil.Process(self.pid).children(recursive=True))
        for process in psutil.process_iter():
            with suppress(ProcessLookupError):
                if process.pid != self.pid and os.getpgid(process.pid) == self.pid:
                    family.add(process)
        return list(family)


def _started(spec: WorkerSpec, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        spec.command,
        env=spec.environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # Ctrl-C in the terminal reaches the launcher only, which stops workers in order.
        start_new_session=True,
    )


def _set_aside_if_long(log: Path) -> None:
    """As `<name>.log.1`, in place of an older one."""
    with suppress(FileNotFoundError):
        if log.stat().st_size > LONGEST_LOG:
            log.replace(log.with_name(f"{log.name}.1"))


def _is_resource_tracker(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any("resource_tracker" in argument for argument in process.cmdline())
    return False


def _alive(processes: list[psutil.Process]) -> bool:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and not (
                process.status() == psutil.STATUS_ZOMBIE and _reaped(process.pid)
            ):
                return True
    return False


def _reaped_one_of(group: int) -> bool:
    """Reap one process of a process group, if this process has adopted one that has ended."""
    with suppress(ChildProcessError):
        return os.waitpid(-group, os.WNOHANG)[0] > 0
    return False


def _reaped(zombie: int) -> bool:
    """Whether it is over with this process, which may have been adopted here (see zygote.py)."""
    try:
        # Not while threads of it are still ending.
        return os.waitpid(zombie, os.WNOHANG)[0] == zombie
    except ChildProcessError:
        return True


def reason_in(log: str) -> str | None:
    """The line of a worker's log that says why it failed: ours first, else the first exception.

    vLLM prefixes lines with process and level and repeats an error in each process it passes
    through; the first exception that is not a mere wrapper is the cause.
    """
    if (ours := _OURS.search(log)) is not None:
        return ours.group().removeprefix("prefillshare: ")
    if (bad := _BAD_ARGUMENT.search(log)) is not None:
        return f"vLLM refuses its arguments: {' '.join(bad[1].split())}"
    failed_at = log.find(_ENGINE_FAILED)
    if failed_at < 0 and _ENGINE_KILLED in log:
        # An exception before it is one that it survived.
        return "its engine process was killed; is there enough memory?"
    for line in log[max(failed_at, 0) :].splitlines():
        found = _EXCEPTION.search(line)
        if found is not None and not found[2].startswith(_WRAPPERS):
            return f"{found[1]}: {found[2]}"
    return None
