"""The cluster that the examples' READMEs serve, on real vLLM engines; and one run of each."""

import contextlib
import importlib
import io
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from examples.record import COLUMNS, HERE, TASKS
from prefillshare_agents import CallRecord
from prefillshare_server.config import Cluster
from tests.served import Served, serve_in_thread


@dataclass(frozen=True)
class Run:
    """What an example's command printed, and the calls of its one session."""

    name: str
    printed: str
    calls: tuple[CallRecord, ...]


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The running cluster; started once, stopped after the last test of this folder."""
    cluster = Cluster.load(HERE / "react" / "cluster.yaml", {"timeouts.start_s": 240})
    with serve_in_thread(cluster, log_dir=tmp_path_factory.mktemp("examples")) as running:
        yield running


@pytest.fixture(scope="package")
def runs(served: Served) -> dict[str, Run]:
    """Every recorded command, run once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", COLUMNS)
        return {name: run(name, task, f"{served.url}/v1") for name, task in TASKS.items()}


def run(name: str, task: int, base_url: str) -> Run:
    # In this process: starting one and importing LangGraph would take longer than the calls.
    program = importlib.import_module(f"examples.{name}.__main__")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        [session] = program.main(base_url=base_url, task=task)
    return Run(name, printed.getvalue(), session.calls)
