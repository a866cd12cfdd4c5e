"""A worker that does not fit its base does not start, and says why in one line."""

import asyncio
from pathlib import Path

import pytest

from prefillshare_server.config import Cluster
from prefillshare_server.errors import ConfigError
from prefillshare_server.launch.local_cluster import LocalCluster
from prefillshare_server.launch.plan import plan
from prefillshare_server.launch.process import WorkerFailedError, WorkerProcess
from tests.worker.driver import START_TIMEOUT_S

pytestmark = pytest.mark.engine


def cluster_with(model: str, **args: str | int) -> Cluster:
    return Cluster.model_validate(
        {
            "base": {"model": "tiny-base"},
            "roles": {"solver": {"model": model, "args": args}},
            "kv": {"blocks": 64},
            "max_model_len": 1024,
        }
    )


async def failure_of_worker(cluster: Cluster, log_dir: Path) -> WorkerFailedError:
    """Start the decode worker alone, until it ends by itself."""
    worker = WorkerProcess(plan(cluster, log_dir=log_dir)[1])
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while worker.running:
                await asyncio.sleep(0.1)
        return worker.failure()
    finally:
        await worker.stop()


async def failure_of_cluster(
    cluster: Cluster, log_dir: Path, states: list[tuple[str, str]]
) -> WorkerFailedError:
    workers = LocalCluster(
        cluster, log_dir=log_dir, on_event=lambda worker, state, _: states.append((worker, state))
    )
    with pytest.raises(WorkerFailedError) as caught:
        async with workers:
            pass
    return caught.value


async def test_another_geometry_or_tokenizer_is_refused(tmp_path: Path) -> None:
    states: list[tuple[str, str]] = []
    # Side by side: each start takes long.
    geometry, tokenizer = await asyncio.gather(
        failure_of_cluster(cluster_with("tiny-other-geometry"), tmp_path / "geometry", states),
        failure_of_worker(cluster_with("tiny-other-tokenizer"), tmp_path / "tokenizer"),
    )
    assert geometry.reason.startswith("worker solver-0: ")
    assert "tiny-other-geometry does not fit the base" in geometry.reason
    assert "num_kv_heads: base 2, decoder 4" in geometry.reason
    assert "\n" not in geometry.reason
    assert str(geometry.log) in str(geometry)
    assert states[-1] == ("solver-0", "failed")
    assert ("prefill-0", "ready") not in states
    assert "tiny-other-tokenizer does not fit the base" in tokenizer.reason
    assert "tokenizer_sha256: base " in tokenizer.reason


def test_settings_that_all_workers_share_cannot_be_set_for_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"roles\.solver\.args\.dtype: .*same for all workers"):
        plan(cluster_with("tiny-a", dtype="bfloat16"), log_dir=tmp_path)
