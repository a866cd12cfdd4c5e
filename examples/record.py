"""`python -m examples.record`: run the examples on a cluster of their own and keep what they print.

Each `recorded.txt` begins with its command. A test runs the same commands and compares.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from examples.react.demo import serving

HERE = Path(__file__).resolve().parent

TASKS = {
    "plain_openai": 19347651,
    "reflexion": 40213776,
    "supervisor": 58120943,
    "swarm": 73346102,
    "tutorial_graph": 61500821,
}
"""Example → the number in front of its question. With it the run repeats token for token."""

NOTEBOOK = HERE / "notebook" / "session.ipynb"

COLUMNS = "100"
"""Width of the recorded tables."""


def main() -> None:
    """Write every `recorded.txt`, and the notebook's outputs."""
    with serving() as url:
        environment = {**os.environ, "COLUMNS": COLUMNS}
        for name, task in TASKS.items():
            command = ["python", "-m", f"examples.{name}", "--task", str(task)]
            done = subprocess.run(
                [sys.executable, *command[1:], "--base-url", f"{url}/v1"],
                cwd=HERE.parent,
                env=environment,
                timeout=300,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            recorded = f"$ {' '.join(command)}\n{done.stdout}"
            (HERE / name / "recorded.txt").write_text(recorded)
        executed = run_notebook(f"{url}/v1")
    nbformat.write(executed, NOTEBOOK)  # type: ignore[no-untyped-call]


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
