"""Runs Python that a model wrote, where it can do no harm and leaves nothing behind.

The program gets a process of its own: an interpreter in isolated mode, an empty environment and
folder, no output, limits on time and memory, and a kernel that refuses it processes, threads,
sockets, signals and every change of a file (`sandbox_child`; Linux). It can read files, though with
nobody to tell. A program that looks for the tests in its own process could still fake a pass.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prefillshare_server.errors import ConfigError, Problem

TIMEOUT_S = 10.0
MEMORY_BYTES = 2**30

_CHILD = Path(__file__).with_name("sandbox_child.py")
# numpy's libraries would start threads, which are refused.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended."""

    passed: bool
    """It ran to its end without an exception; leaving early does not count."""
    reason: str
    """``passed``, ``timeout``, ``killed`` (a limit), or the exception."""


def run(code: str, *, timeout_s: float = TIMEOUT_S, memory_bytes: int = MEMORY_BYTES) -> Outcome:
    """Run `code` to its end; blocks for `timeout_s` at most, start of the interpreter included.

    Raises ConfigError where the system cannot confine it.
    """
    token = secrets.token_hex(16)
    reader, writer = os.pipe()
    try:
        with tempfile.TemporaryDirectory(prefix="prefillshare-sandbox-") as folder:
            task = {
                "code": code,
                "memory_bytes": memory_bytes,
                "cpu_s": int(timeout_s) + 1,
                "token": token,
                "result_fd": writer,
            }
            in_time = _run(json.dumps(task), folder, writer, timeout_s)
        os.close(writer)
        writer = -1
        if not in_time:
            return Outcome(False, "timeout")
        return _outcome(os.read(reader, 4096), token)
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def _run(task: str, folder: str, result_fd: int, timeout_s: float) -> bool:
    """Whether the process ended in time; it is gone in either case."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", "-X", "utf8", str(_CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=_ENVIRONMENT,
        pass_fds=(result_fd,),
        start_new_session=True,
        text=True,
    )
    try:
        process.communicate(task, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
    return True


def _outcome(report: bytes, token: str) -> Outcome:
    try:
        verdict = json.loads(report)
    except ValueError:
        return Outcome(False, "killed")
    if not isinstance(verdict, dict):
        return Outcome(False, "killed")
    if "unconfined" in verdict:
        raise ConfigError(
            Problem(
                "sandbox",
                f"this system cannot confine a program ({verdict['unconfined']})",
                "run tasks that execute code on Linux, x86-64 or ARM64, outside other sandboxes",
            )
        )
    if verdict.get("passed") == token:
        return Outcome(True, "passed")
    return Outcome(False, str(verdict.get("failed", "killed")))
