"""The file of an evaluation: a line per answer, written as it is given, so that nothing is lost."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from prefillshare_server.errors import ConfigError, Problem

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Line:
    """One scored answer."""

    item: str
    prompt_sha256: str
    """16 hex digits of the prompt's token ids."""
    prompt_tokens: int
    text: str
    """Without the token that ended it."""
    ids: tuple[int, ...]
    logprob: float | None
    """Of the whole answer."""
    finish: str
    """``stop``, ``length``, or ``no_room`` for a prompt that fills the context."""
    scores: Mapping[str, float]


class AnswersFile:
    """JSON lines: the settings first, then an answer each. One process writes at a time."""

    def __init__(self, path: Path, file: FileIO, lines: dict[str, Line]) -> None:
        self.path = path
        self.lines = lines
        """By item, what is in the file."""
        self._file = file

    def add(self, line: Line) -> None:
        """Append; on disk when this returns, unless the machine fails. Raises ConfigError."""
        _append(self.path, self._file, asdict(line))
        self.lines[line.item] = line


@contextmanager
def opened(
    path: Path, settings: Mapping[str, Any], *, overwrite: bool = False
) -> Iterator[AnswersFile]:
    """The file at `path`, made or gone on with.

    A last line that was cut off is dropped. Raises ConfigError when the file belongs to other
    settings or to another process that still writes.
    """
    header = {"format": FORMAT, **settings}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
    except OSError as error:
        reason = error.strerror or str(error)
        raise _unusable(path, f"cannot be written ({reason})", "choose another --out") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _unusable(
                path, "another evaluation is writing it", "wait for it, or choose another --out"
            ) from None
        if overwrite:
            os.truncate(path, 0)
        lines = _read(path, header)
        if not path.stat().st_size:
            _append(path, file, header)
        yield AnswersFile(path, file, lines)


def _append(path: Path, file: FileIO, value: Mapping[str, Any]) -> None:
    line = _encoded(value)
    try:
        # Unbuffered, and so in one piece unless the disk is full.
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise _unusable(
            path,
            f"cannot be written ({error.strerror or error}); finished answers are kept",
            "free some space and run the command again",
        ) from None


def _encoded(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False) + "\n").encode()


def _read(path: Path, header: Mapping[str, Any]) -> dict[str, Line]:
    """What is in the file. Changes it only once it is known to hold answers of this evaluation."""
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if not whole and _encoded(header).startswith(raw):
        os.truncate(path, 0)
        return {}
    first, *rest = whole.splitlines() or [raw]
    try:
        written = json.loads(first)
        found = [Line(**json.loads(line)) for line in rest]
    except (ValueError, TypeError):
        raise _unusable(path, "holds no answers of an evaluation", "choose another --out") from None
    if not isinstance(written, dict) or written != header:
        differing = [
            key
            for key in (*header, *(written if isinstance(written, dict) else ()))
            if not isinstance(written, dict) or written.get(key) != header.get(key)
        ]
        raise _unusable(
            path,
            f"holds answers of another evaluation ({', '.join(dict.fromkeys(differing))} differ)",
            "choose another --out, or --overwrite it",
        )
    os.truncate(path, len(whole))
    return {line.item: line for line in found}


def _unusable(path: Path, what: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(str(path), what, remedy))
