"""Create the project's virtual environment and install requirements/cpu.lock into it.

Standard library only: it runs before anything is installed. A second run finds the stamp of the
first and returns at once; a changed lock or pyproject.toml installs what changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock"
OLDEST_PYTHON = (3, 11)


class SetupError(Exception):
    """A command of the set-up failed; the text says which and shows the end of its output."""


def locked() -> tuple[str, list[str]]:
    """The torch requirement and all other pinned requirements of the lock."""
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    [torch] = [line for line in lines if line.startswith("torch==")]
    return torch, [line for line in lines if line != torch]


def fingerprint() -> str:
    """Changes when an installed environment is out of date."""
    parts = [LOCK.read_bytes(), (ROOT / "pyproject.toml").read_bytes(), sys.version.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def run(title: str, command: Sequence[str | Path], packages: int = 1) -> None:
    """Run a pip-like command, showing one line of progress instead of its output.

    Raises SetupError with the last lines of the output when the command fails.
    """
    started, seen, output = time.monotonic(), 0, []
    print(f"  {title} …", flush=True)
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if line.startswith(("Collecting", "Requirement already")):
            seen += 1
            if sys.stdout.isatty():
                print(f"    {seen}/{packages} {line.split()[1]:<60}", end="\r", flush=True)
            elif seen % 50 == 0:
                print(f"    {seen}/{packages} packages fetched", flush=True)
        elif line.startswith("Installing collected") and packages > 1:
            print(f"    unpacking {packages} packages (about a minute) {'':<30}", flush=True)
    if process.wait():
        raise SetupError(f"{title} failed; the end of its output:\n{''.join(output[-15:])}")
    print(f"    done in {time.monotonic() - started:.0f} s{'':<50}", flush=True)


def install_torch(python: Path, torch: str) -> None:
    """Install the CPU build of torch, from the configured index or else from PyTorch's own.

    pip finds CPU builds only where an index or folder with them is configured; uv knows where
    PyTorch publishes them.
    """
    try:
        run("torch (CPU build)", [python, "-m", "pip", "install", "--no-deps", torch])
    except SetupError:
        print("    not on the configured package index; asking uv for PyTorch's CPU builds")
        run("uv", [python, "-m", "pip", "install", "uv"])
        uv = [python, "-m", "uv", "pip", "install", "--python", python, "--no-deps"]
        run("torch (CPU build)", [*uv, "--torch-backend=cpu", torch.removesuffix("+cpu")])


def install(folder: Path) -> None:
    """Fill the virtual environment at ``folder``."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"  virtual environment {folder} …", flush=True)
        venv.create(folder, with_pip=True)
    torch, others = locked()
    install_torch(python, torch)
    pip = [python, "-m", "pip", "install", "--no-deps"]
    run("locked packages", [*pip, *others], packages=len(others))
    run("prefillshare-agents", [*pip, "--no-build-isolation", "--editable", ROOT])


def main() -> None:
    """Set up, or return at once when nothing changed since the last set-up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="its folder")
    folder = parser.parse_args().venv.absolute()
    if sys.version_info < OLDEST_PYTHON:
        raise SystemExit(
            f"Python {sys.version.split()[0]} is too old: prefillshare-agents needs 3.11 or newer. "
            "Name one with `make PYTHON=python3.11 …`."
        )
    stamp = folder / "prefillshare-setup"
    if stamp.exists() and stamp.read_text() == fingerprint():
        return
    print("Setting up (3 to 5 minutes on the first run, seconds afterwards)", flush=True)
    try:
        install(folder)
    except SetupError as error:
        raise SystemExit(f"set-up failed: {error}") from None
    stamp.write_text(fingerprint())


if __name__ == "__main__":
    main()
