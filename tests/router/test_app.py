"""Everything beside the calls: models, health, metrics, start-up."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from prefillshare_server.config import Cluster
from prefillshare_server.errors import ConfigError
from prefillshare_server.router.app import create_app
from prefillshare_server.router.topology import WorkerEndpoint
from tests.mocks.mock_workers import MAX_MODEL_LEN
from tests.router.conftest import Bench, Start


async def test_models_lists_the_roles_and_flags_the_base(bench: Bench) -> None:
    _, listed = await bench.get("/v1/models")
    assert listed["object"] == "list"
    callable_ = {card["id"]: card["prefillshare"]["callable"] for card in listed["data"]}
    assert callable_ == {"alpha": True, "beta": True, "base": False}
    assert {card["max_model_len"] for card in listed["data"]} == {MAX_MODEL_LEN}
    assert listed["data"][0]["parent"] == "base"


async def test_health_needs_every_worker_and_live_needs_none(start: Start) -> None:
    async with start() as bench:
        assert (await bench.get("/health"))[0] == 200
        await bench.decode["beta-0"].stop()
        status, body = await bench.get("/health")
        assert status == 503
        assert body["workers"]["beta-0"] == "unreachable"
        assert body["workers"]["prefill-0"] == "ok"
        assert (await bench.get("/live"))[0] == 200


async def test_metrics_count_calls_tokens_and_results(bench: Bench) -> None:
    _, answer, _ = await bench.chat()
    await bench.stream()
    bench.decode["alpha-0"].fault = "status_400"
    await bench.chat()
    prompt = answer["usage"]["prompt_tokens"]
    assert await bench.counted("prefillshare_router_requests_total", 3) == 3
    assert await bench.metric('prefillshare_router_requests_total{model="alpha",result="ok"}') == 2
    assert await bench.metric("prefillshare_prefill_computed_tokens_total") <= 3 * prompt
    assert await bench.metric("prefillshare_ttft_seconds_count") == 1
    assert await bench.metric("prefillshare_router_overhead_seconds_count") == 3
    assert await bench.metric("prefillshare_handoff_bytes_total") > 0
    assert await bench.metric("prefillshare_decode_local_prefill_tokens_total") == 0


async def test_metrics_never_name_a_session(bench: Bench) -> None:
    await bench.chat(headers={"X-Session-ID": "a-secret-name"})
    async with bench.http.get(f"{bench.url}/metrics") as response:
        text = await response.text()
    assert "a-secret-name" not in text
    assert "\nvllm" not in text


def cluster() -> Cluster:
    return Cluster.model_validate({"base": {"model": "x"}, "roles": {"alpha": {"model": "x"}}})


def endpoints(**changes: Any) -> list[WorkerEndpoint]:
    return [
        WorkerEndpoint("prefill-0", "prefill", None, "http://127.0.0.1:1", "base"),
        WorkerEndpoint("alpha-0", "decode", "alpha", "http://127.0.0.1:2", "alpha"),
    ]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_missing_kind_of_worker_is_told_at_start(base_dir: Path, phase: str) -> None:
    workers = [worker for worker in endpoints() if worker.phase == phase]
    with pytest.raises(ConfigError, match="start at least one of each"):
        create_app(cluster(), workers, base_dir)


def test_a_base_without_a_fast_tokenizer_is_told_at_start(base_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "base"
    shutil.copytree(base_dir, copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        create_app(cluster(), endpoints(), copy)
