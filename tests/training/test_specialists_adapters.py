"""The adapters in the repository: small, whole, and better than the base at their job."""

import json
from pathlib import Path

import pytest

from examples.react.roles import ROLES
from examples.specialists.build import CLUSTER, HERE, LORA, RESULTS
from examples.specialists.generate import HELD_OUT
from prefillshare_server.config import Cluster
from prefillshare_server.models.provenance import Provenance

MOST_BYTES = 5_000_000


def record(role: str) -> Provenance:
    found = Provenance.read(HERE / role)
    assert found is not None
    return found


@pytest.mark.parametrize("role", ROLES)
def test_an_adapter_is_a_few_megabytes(role: str) -> None:
    files = [path for path in (HERE / role).iterdir() if path.is_file()]

    assert {"adapter_config.json", "adapter_model.safetensors", "prefillshare.json"} <= {
        path.name for path in files
    }
    assert sum(path.stat().st_size for path in files) < MOST_BYTES


@pytest.mark.parametrize("role", ROLES)
def test_an_adapter_says_where_it_comes_from(role: str) -> None:
    made = record(role)
    cluster = Cluster.load(CLUSTER)
    config = json.loads((HERE / role / "adapter_config.json").read_text())

    assert made.method == "prefillshare"
    assert made.base == config["base_model_name_or_path"] == cluster.base.model
    assert made.hyperparameters["layout"] == cluster.layout.model_dump(mode="json")
    assert made.hyperparameters["lora"]["rank"] == config["r"] == LORA.rank
    assert made.data["source"].startswith("python -m examples.specialists.generate")


def test_all_adapters_read_the_same_base_and_layout() -> None:
    made = [record(role) for role in ROLES]

    assert len({(each.base_fingerprint, each.layout_fingerprint) for each in made}) == 1


@pytest.mark.parametrize("role", ROLES)
def test_a_specialist_does_its_job_better_than_the_base(role: str) -> None:
    (found,) = record(role).evaluation

    assert found["n"] == HELD_OUT
    assert found["specialist"] > 80
    assert found["specialist_ci95"][0] > found["base_ci95"][1] + 30
    assert json.loads(RESULTS.read_text())[role].items() <= found.items()


@pytest.mark.parametrize("role", ROLES)
def test_the_demo_serves_the_adapter(role: str) -> None:
    decoder = Cluster.load(CLUSTER).roles[role].decoder

    assert decoder.field == "adapter"
    assert Path(decoder.ref) == HERE / role
