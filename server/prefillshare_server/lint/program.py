"""Running a program so that its chat requests are recorded, without changing it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.lint.recorder import recording

OPENAI = "https://api.openai.com/v1"
"""Where openai's clients go when nothing else is said."""


@dataclass(frozen=True, slots=True)
class Run:
    """A program that has ended."""

    trace: Path
    """Its chat requests; gone with the block, unless it was to be kept."""
    exit_code: int


@contextmanager
def recorded(
    command: Sequence[str],
    *,
    upstream: str | None = None,
    keep: Path | None = None,
    output: int | None = None,
    timeout_s: float = 600,
) -> Iterator[Run]:
    """Run `command` with its openai clients pointed at a recorder; yields when it has ended.

    The recorder passes everything on to `upstream`, by default where the clients would have gone.
    `keep` is a file for the trace, `output` a file descriptor for the program's stdout. Raises
    ConfigError if it cannot be started.
    """
    real = upstream or os.environ.get("OPENAI_BASE_URL") or OPENAI
    with _Signals() as signals, tempfile.TemporaryDirectory(prefix="prefillshare-lint-") as folder:
        passed, sent = Path(folder, "passed.jsonl"), Path(folder, "sent.jsonl")
        passed.touch()
        with recording(real, passed, timeout_s=timeout_s) as url:
            code = _run(command, _environment(url, sent), output, signals)
        trace = keep or Path(folder, "trace.jsonl")
        try:
            trace.write_text(_merged(passed, sent), encoding="utf-8", errors="surrogatepass")
        except OSError as error:
            problem = Problem(f"--save {trace}", str(error), "give a file that can be written")
            raise ConfigError(problem) from None
        yield Run(trace, code)


def _environment(url: str, sent: Path) -> dict[str, str]:
    local = "127.0.0.1,localhost"
    no_proxy = ",".join(filter(None, (os.environ.get("NO_PROXY"), local)))
    return {
        **os.environ,
        "OPENAI_BASE_URL": url,
        # langchain-openai and openai before version 1.
        "OPENAI_API_BASE": url,
        # The SDK's clients write down what they send, wherever they send it.
        "PREFILLSHARE_TRACE": str(sent),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


class _Signals:
    """Passes what would end this process on to the program, whose end is waited for.

    With no program running it ends this process as usual, but not before everything is put away.
    """

    def __init__(self) -> None:
        self._program: subprocess.Popen[bytes] | None = None
        self._starting = False
        self._early: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: int | None
    ) -> subprocess.Popen[bytes]:
        """Start the program. Raises OSError if that is not possible."""
        self._starting = True
        try:
            self._program = subprocess.Popen(list(command), env=dict(environment), stdout=output)
        finally:
            self._starting = False
        for number in self._early:
            self._program.send_signal(number)
        return self._program

    def _arrived(self, number: int, _: object) -> None:
        if self._starting:
            self._early.append(number)
        elif self._program is None or self._program.returncode is not None:
            raise SystemExit(128 + number)
        else:
            self._program.send_signal(number)


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: int | None,
    signals: _Signals,
) -> int:
    try:
        process = signals.start(command, environment, output)
    except OSError as error:
        raise ConfigError(
            Problem(
                f"-- {command[0]}",
                f"cannot be run ({error.strerror})",
                "write the command behind `--` as in a shell, for example: -- python app.py",
            )
        ) from None
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the terminal told the program as well; what it sent so far is judged


def _merged(passed: Path, sent: Path) -> str:
    """One trace of what passed the recorder and what the SDK's clients sent past it."""
    entries = _entries(passed)
    seen = {json.dumps(entry.get("body")) for entry in entries}
    entries += [entry for entry in _entries(sent) if json.dumps(entry.get("body")) not in seen]
    entries.sort(key=lambda entry: float(entry.get("time") or 0))
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)


def _entries(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="surrogatepass")
    return [json.loads(line) for line in text.split("\n") if line.strip()]
