"""What is started for a cluster file."""

import json
from pathlib import Path
from typing import Any

import pytest

from prefillshare_server.config import Cluster
from prefillshare_server.launch.hardware import Hardware
from prefillshare_server.launch.plan import WorkerSpec, plan

CPU = Hardware(on_cpu=True, cores=8, memory_bytes=64 << 30)
GPU = Hardware(on_cpu=False, cores=32, memory_bytes=256 << 30, gpus=2)


def cluster_of(**settings: Any) -> Cluster:
    return Cluster.model_validate(
        {
            "base": {"model": "tiny-base", "name": "the-base"},
            "prefill": {"replicas": 2},
            "roles": {"planner": {"model": "tiny-a"}, "critic": {"model": "tiny-b"}},
            **settings,
        }
    )


def planned(tmp_path: Path, hardware: Hardware = CPU, **settings: Any) -> dict[str, WorkerSpec]:
    specs = plan(cluster_of(**settings), log_dir=tmp_path, hardware=hardware)
    return {spec.name: spec for spec in specs}


def argument(spec: WorkerSpec, name: str) -> str:
    """Value of `--name`."""
    return spec.argv[spec.argv.index(f"--{name}") + 1]


def test_every_replica_of_every_pool_is_a_worker(tmp_path: Path) -> None:
    specs = planned(tmp_path)
    assert list(specs) == ["prefill-0", "prefill-1", "planner-0", "critic-0"]
    assert [spec.pool for spec in specs.values()] == [None, None, "planner", "critic"]
    assert [spec.served_name for spec in specs.values()] == [
        "the-base",
        "the-base",
        "planner",
        "critic",
    ]


def test_with_a_pool_per_role_each_role_has_prefill_workers_of_the_base(tmp_path: Path) -> None:
    specs = planned(tmp_path, prefill={"pool": "per_role", "replicas": 2})
    prefill = [spec for spec in specs.values() if spec.phase == "prefill"]
    assert [(spec.name, spec.pool) for spec in prefill] == [
        ("prefill-planner-0", "planner"),
        ("prefill-planner-1", "planner"),
        ("prefill-critic-0", "critic"),
        ("prefill-critic-1", "critic"),
    ]
    assert {spec.served_name for spec in prefill} == {"the-base"}
    assert len({spec.model for spec in prefill}) == 1
    assert list(specs)[4:] == ["planner-0", "critic-0"]


@pytest.mark.parametrize(
    "settings",
    [{}, {"lora": {}}, {"mode": "colocated"}, {"prefill": {"pool": "per_role"}}],
)
def test_the_effective_configuration_starts_the_same_workers(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    roles = {"critic": {"model": "tiny-base"}}
    before = planned(tmp_path, roles=roles, **settings)
    file = tmp_path / "cluster.yaml"
    file.write_text(cluster_of(roles=roles, **settings).to_yaml())
    after = plan(Cluster.load(file), log_dir=tmp_path, hardware=CPU)
    assert [spec.name for spec in after] == list(before)


def test_no_two_workers_share_a_port(tmp_path: Path) -> None:
    specs = planned(tmp_path).values()
    ports = [port for spec in specs for port in (spec.port, spec.side_channel_port)]
    assert len(set(ports)) == 8


def test_new_ports_reach_the_command_and_the_environment(tmp_path: Path) -> None:
    spec = planned(tmp_path)["critic-0"].on_new_ports()
    assert spec.arguments[:2] == ["--port", str(spec.port)]
    assert spec.command[-len(spec.arguments) :] == spec.arguments
    assert spec.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(spec.side_channel_port)


def test_decode_workers_fail_closed(tmp_path: Path) -> None:
    transfer = json.loads(argument(planned(tmp_path)["planner-0"], "kv-transfer-config"))
    extra = transfer["kv_connector_extra_config"]
    assert transfer["kv_role"] == "kv_consumer"
    assert transfer["kv_load_failure_policy"] == "fail"
    assert extra["kv_recompute_threshold"] == 0
    assert extra["bidirectional_kv_xfer"] is False


def test_only_decode_workers_get_our_scheduler(tmp_path: Path) -> None:
    specs = planned(tmp_path)
    assert argument(specs["planner-0"], "scheduler-cls").endswith(".PrefillShareScheduler")
    assert "--scheduler-cls" not in specs["prefill-0"].argv


def test_all_workers_carry_one_contract(tmp_path: Path) -> None:
    contracts = [
        json.loads(argument(spec, "kv-transfer-config"))["kv_connector_extra_config"][
            "prefillshare"
        ]
        for spec in planned(tmp_path).values()
    ]
    assert all(contract == contracts[0] for contract in contracts)
    assert contracts[0]["geometry"]["num_kv_heads"] == 2
    assert (contracts[0]["dtype"], contracts[0]["block_size"]) == ("float32", 32)


def test_the_base_fingerprint_names_the_weights(tmp_path: Path) -> None:
    def fingerprint(base: str) -> str:
        spec = planned(tmp_path, base={"model": base})["prefill-0"]
        transfer = json.loads(argument(spec, "kv-transfer-config"))
        found: str = transfer["kv_connector_extra_config"]["prefillshare"]["fingerprint"]
        return found

    assert fingerprint("tiny-base") == fingerprint("tiny-base")
    assert fingerprint("tiny-base") != fingerprint("tiny-c")


def test_role_arguments_win_over_pool_arguments_and_defaults(tmp_path: Path) -> None:
    roles = {
        "planner": {"model": "tiny-a", "args": {"max-num-seqs": 4}},
        "critic": {"model": "tiny-b", "args": {"enable-prefix-caching": False}},
    }
    pool = {"args": {"max-num-seqs": 8, "tool-call-parser": "pythonic"}}
    specs = planned(tmp_path, roles=roles, decode=pool)
    assert argument(specs["planner-0"], "max-num-seqs") == "4"
    assert argument(specs["critic-0"], "max-num-seqs") == "8"
    assert argument(specs["critic-0"], "tool-call-parser") == "pythonic"
    assert "--no-enable-prefix-caching" in specs["critic-0"].argv
    assert "--max-num-seqs" not in specs["prefill-0"].argv


def test_cores_are_divided_among_cpu_workers(tmp_path: Path) -> None:
    assert planned(tmp_path)["prefill-0"].env["OMP_NUM_THREADS"] == "2"


def test_threads_of_a_cpu_worker_do_not_spin_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless whoever starts it says how."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert planned(tmp_path)["critic-0"].environment["GOMP_SPINCOUNT"] == "1000"
    one_thread = Hardware(on_cpu=True, cores=4, memory_bytes=64 << 30)
    assert "GOMP_SPINCOUNT" not in planned(tmp_path, one_thread)["critic-0"].environment
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in planned(tmp_path)["critic-0"].environment


def test_cpu_workers_get_blocks_for_a_tenth_of_the_memory(tmp_path: Path) -> None:
    small = Hardware(on_cpu=True, cores=2, memory_bytes=8 << 30)
    blocks = int(argument(planned(tmp_path, small)["critic-0"], "num-gpu-blocks-override"))
    # Keys and values of 4 layers, 2 KV heads of size 32, in fp32, 32 tokens per block.
    block_bytes = 2 * 4 * 2 * 32 * 4 * 32
    assert 4 * blocks * block_bytes == pytest.approx(0.1 * (8 << 30), rel=0.01)


def test_a_request_of_full_length_always_fits(tmp_path: Path) -> None:
    tiny = Hardware(on_cpu=True, cores=1, memory_bytes=64 << 20)
    blocks = int(argument(planned(tmp_path, tiny)["critic-0"], "num-gpu-blocks-override"))
    assert blocks == 4096 // 32 + 1


def test_gpu_workers_take_turns_on_the_gpus_that_a_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    devices = [spec.env["CUDA_VISIBLE_DEVICES"] for spec in planned(tmp_path, GPU).values()]
    assert devices == ["4", "7", "4", "7"]


def test_gpu_workers_take_turns_on_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    specs = planned(tmp_path, GPU)
    devices = [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs.values()]
    assert devices == ["0", "1", "0", "1"]
    assert argument(specs["critic-0"], "gpu-memory-utilization") == "0.45"
    assert argument(specs["critic-0"], "scheduler-cls").endswith(".PrefillShareAsyncScheduler")
    assert "--enforce-eager" not in specs["critic-0"].argv
