"""A step in a process of its own: a launcher should not keep torch loaded."""

from __future__ import annotations

import subprocess


def run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run `command` quietly; a timeout is reported as a failed result."""
    try:
        return subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"gave up after {timeout_s:.0f} s")


def last_line(text: str) -> str:
    """Of a traceback, what went wrong."""
    return (text.strip().splitlines() or ["no output"])[-1]
