"""The cluster that the examples' READMEs serve, on real vLLM engines; and one run of each."""

import contextlib
import importlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.record import COLUMNS, HERE, TASKS
from prefillshare_agents import Session
from prefillshare_server.config import Cluster
from prefillshare_server.lint import recorder
from tests.served import Served, serve_in_thread


@dataclass(frozen=True)
class Run:
    """What an example's command printed, its sessions, and a trace of its requests."""

    name: str
    printed: str
    sessions: list[Session]
    trace: Path


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The running cluster; started once, stopped after the last test of this folder."""
    cluster = Cluster.load(HERE / "react" / "cluster.yaml", {"timeouts.start_s": 240})
    with serve_in_thread(cluster, log_dir=tmp_path_factory.mktemp("examples")) as running:
        yield running


@pytest.fixture(scope="package")
def runs(served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Every recorded command, run once."""
    folder = tmp_path_factory.mktemp("traces")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", COLUMNS)
        # On a busy machine an answer may be written down long after its client has it.
        patch.setattr(recorder, "_SETTLE_S", 60)
        for name, task in TASKS.items():
            trace = folder / f"{name}.jsonl"
            with recorder.recording(f"{served.url}/v1", trace) as base_url:
                found[name] = run(name, task, base_url, trace)
    return found


def run(name: str, task: int, base_url: str, trace: Path) -> Run:
    # In this process: starting one and importing LangGraph would take longer than the calls.
    program = importlib.import_module(f"examples.{name}.__main__")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        sessions = program.main(base_url=base_url, task=task)
    return Run(name, printed.getvalue(), sessions, trace)
