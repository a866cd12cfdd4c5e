"""One cluster on real vLLM engines for the tests of this folder: 2 prefill workers, 4 roles."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefillshare_server.config import Cluster
from prefillshare_server.models import store
from tests.served import Served, serve_in_thread

CLUSTER = """\
version: 1
base: {model: tiny-base}
prefill: {replicas: 2}
roles:
  planner: {model: tiny-a}
  toolcaller: {model: tiny-c}
  solver: {model: tiny-b}
  critic: {model: tiny-c}
decode:
  args:
    # Random weights like blanks, and JSON may hold any number of them.
    structured-outputs-config: '{"backend": "xgrammar", "disable_any_whitespace": true}'
dtype: float32
max_model_len: 4096
kv: {blocks: 512}
timeouts: {start_s: 240, queue_s: 180, prefill_s: 240}
"""


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The running cluster; started once, stopped after the last test of this folder."""
    folder = tmp_path_factory.mktemp("cluster")
    path = folder / "cluster.yaml"
    path.write_text(CLUSTER)
    with serve_in_thread(Cluster.load(path), log_dir=folder / "logs") as running:
        yield running


@pytest.fixture(scope="session")
def models() -> dict[str, Path]:
    """Model directories by the name of the base or role they serve."""
    names = {"base": "tiny-base", "planner": "tiny-a", "solver": "tiny-b"}
    return {role: store.resolve(name) for role, name in names.items()}
