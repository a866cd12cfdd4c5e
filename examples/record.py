"""`python -m examples.record`: run the examples on a cluster of their own and keep what they print.

Each `recorded.txt` begins with its command. A test runs the same commands and compares.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from examples.react.demo import serving
from prefillshare_server.lint.recorder import recording

HERE = Path(__file__).resolve().parent

TASKS = {
    "react": 27182818,
    "plain_openai": 19347651,
    "reflexion": 40213776,
    "supervisor": 58120943,
    "swarm": 73346102,
    "tutorial_graph": 61500821,
}
"""Example → the number in front of its question. With it the run repeats token for token."""

CONTROL = "tutorial_graph"
"""The example whose requests are looked at in the model's own layout too."""

LINT = (
    *("lint", "trace.jsonl"),
    *("--cluster", "examples/react/cluster.yaml", "--layout", "model"),
)
"""The arguments of `prefillshare` that do it, with the trace in the second place."""

NOTEBOOK = HERE / "notebook" / "session.ipynb"

COLUMNS = "100"
"""Width of the recorded tables."""


def main() -> None:
    """Write every `recorded.txt`, and the notebook's outputs."""
    with serving() as url:
        for name, task in TASKS.items():
            (HERE / name / "recorded.txt").write_text(recorded(name, task, f"{url}/v1"))
        executed = run_notebook(f"{url}/v1")
    nbformat.write(executed, NOTEBOOK)  # type: ignore[no-untyped-call]


def recorded(name: str, task: int, base_url: str) -> str:
    """Run an example; return its command and what it printed."""
    command = ["python", "-m", f"examples.{name}", "--task", str(task)]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        with recording(base_url, trace) as recorder:
            printed = run([sys.executable, *command[1:], "--base-url", recorder])
        text = f"$ {' '.join(command)}\n{printed}"
        if name == CONTROL:
            prefillshare = str(Path(sys.executable).with_name("prefillshare"))
            printed = run([prefillshare, LINT[0], str(trace), *LINT[2:]])
            text += f"\n$ prefillshare {' '.join(LINT)}\n{without_ids(printed)}"
    return text


def run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command,
        cwd=HERE.parent,
        env={**os.environ, "COLUMNS": COLUMNS},
        timeout=300,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def without_ids(printed: str) -> str:
    """What was printed, without the ids of sessions: they are new in every run."""
    return re.sub(r"\b[0-9a-f]{32}\b", "…", printed)


def read_notebook() -> Any:
    """The notebook with its recorded outputs."""
    return nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]


def run_notebook(base_url: str) -> Any:
    """The notebook with the outputs of a run in a kernel of its own."""
    notebook = read_notebook()
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", record_timing=False)
    client.execute(env={**os.environ, "OPENAI_BASE_URL": base_url})
    return notebook


if __name__ == "__main__":
    main()
