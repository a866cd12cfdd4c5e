"""A directory that appears whole or not at all, built by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prefillshare_server.errors import ConfigError, Problem

Progress = Callable[[str], None]
"""Called with a short description at the start of each step."""

LOCK_TIMEOUT_S = 900.0


def build_once(
    target: Path,
    write: Callable[[Path], None],
    *,
    found: Callable[[], Path | None],
    progress: Progress,
) -> Path:
    """`target`, filled by `write` unless `found` knows it already; returns its directory.

    `write` gets a temporary sibling, which takes the place of `target` when it is complete.
    Safe to call from several processes: one builds, the others wait for it. Raises ConfigError
    when the disk is full or another process holds the lock for too long.
    """
    if done := found():
        return done
    folder, name = target.parent, target.name
    with locked(target, progress):
        # Another process may have built it while this one waited.
        if done := found():
            return done
        for leftover in folder.glob(f".{name}.*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=folder))
        try:
            write(work)
            _make_readable(work)
            shutil.rmtree(target, ignore_errors=True)
            work.rename(target)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise ConfigError(disk_full(target)) from None
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def require_space(target: Path, needed: int) -> None:
    """Raise ConfigError when `needed` bytes do not fit beside `target`, whose folder exists."""
    if (free := shutil.disk_usage(target.parent).free) < needed:
        raise ConfigError(disk_full(target, f"{needed >> 20} MiB needed, {free >> 20} MiB free"))


def disk_full(target: Path, detail: str = "") -> Problem:
    """The problem of a disk without room for `target`."""
    return Problem(
        str(target),
        f"the disk is full{f' ({detail})' if detail else ''}",
        "free some space, or set PREFILLSHARE_HOME to a folder on another disk",
    )


@contextmanager
def locked(target: Path, progress: Progress) -> Iterator[None]:
    """An exclusive lock on building or removing `target`; gives up after LOCK_TIMEOUT_S."""
    folder, name = target.parent, target.name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    progress(f"another process is building {name}; waiting")
                    waiting = True
                if time.monotonic() > deadline:
                    raise ConfigError(
                        Problem(
                            f"model {name}",
                            f"another process has held {file.name} for {LOCK_TIMEOUT_S:.0f} s",
                            "stop that process and try again",
                        )
                    ) from None
                time.sleep(0.2)
        yield


def silent(step: str) -> None:
    """No progress wanted."""


def _make_readable(directory: Path) -> None:
    # mkdtemp and safetensors create private files; a model is no secret.
    directory.chmod(0o755)
    for file in directory.iterdir():
        file.chmod(0o644)
