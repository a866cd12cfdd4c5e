"""Clusters on real vLLM engines whose roles are adapters: on two decode workers, in one engine."""

from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from prefillshare_server.config import Cluster
from prefillshare_server.models import store
from tests.adapters import write_adapter
from tests.served import Served, serve_in_thread

# `max_loras` is less than the adapters that the tests use: they take turns in the slots.
COMMON = """\
version: 1
base: {{model: tiny-base}}
roles:
  planner: {{adapter: {planner}}}
  solver: {{adapter: {solver}}}
  critic: {{model: tiny-base}}
dtype: float32
max_model_len: 4096
kv: {{blocks: 512}}
timeouts: {{start_s: 240, queue_s: 180}}
allow_untrained: true
"""

CLUSTERS = {
    "disaggregated": COMMON.replace("dtype:", "  judge: {{model: tiny-a}}\ndtype:")
    + "lora: {{replicas: 2, max_loras: 2, max_lora_rank: 16}}\n",
    # Prompts run in chunks.
    "colocated": COMMON + "mode: colocated\n"
    "lora: {{max_loras: 2, max_lora_rank: 16, args: {{max-num-batched-tokens: 128, "
    "max-num-seqs: 16}}}}\n",
}


@pytest.fixture(scope="package", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Restarted workers outlive the test that killed them, so this looks at the whole folder."""
    yield
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=60)
    assert not alive


@pytest.fixture(scope="package")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters that differ in rank, scale and the layers they adapt."""
    base_dir, folder = store.build("tiny-base"), tmp_path_factory.mktemp("adapters")
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return {
        "planner": write_adapter(base_dir, folder / "planner", seed=1, rank=4),
        "solver": write_adapter(
            base_dir,
            folder / "solver",
            seed=2,
            rank=16,
            targets=every,
            rank_pattern={"k_proj": 2},
            alpha_pattern={"up_proj": 5},
            use_rslora=True,
            lora_alpha=8,
        ),
        "late": write_adapter(base_dir, folder / "late", seed=3, rank=8, targets=("up_proj",)),
    }


@pytest.fixture(scope="package", params=["disaggregated", "colocated"])
def served(
    request: pytest.FixtureRequest,
    adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    nothing_left_behind: None,
) -> Iterator[Served]:
    """The running cluster; started once, stopped after the last test of this folder in its mode."""
    folder = tmp_path_factory.mktemp(request.param)
    path = folder / "cluster.yaml"
    path.write_text(CLUSTERS[request.param].format(**adapters))
    with serve_in_thread(Cluster.load(path), log_dir=folder / "logs", supervised=True) as running:
        yield running


@pytest.fixture
def colocated(served: Served) -> bool:
    """Whether one engine does everything."""
    return served.workers[0].phase == "colocated"


@pytest.fixture(scope="package")
def decoders(adapters: dict[str, Path]) -> dict[str, Path]:
    """Weights by role, as the reference loads them."""
    base_dir = store.resolve("tiny-base")
    return {**adapters, "base": base_dir, "critic": base_dir, "judge": store.resolve("tiny-a")}


@pytest.fixture
def served_roles(client: openai.OpenAI) -> list[str]:
    """Every role of the cluster."""
    return [model.id for model in client.models.list() if model.id != "base"]
