"""The commands on real engines: what is measured, that it is right, and that it can be reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefillshare_bench import adapters, traces
from prefillshare_bench.traces import Context
from prefillshare_server.models import adapter, store
from tests.bench.conftest import bench, computed_once
from tests.reference import base_cache_greedy

# Most start a system or two themselves.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture
def home(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store of the tests also for the processes that they start."""
    monkeypatch.setenv("PREFILLSHARE_HOME", str(tiny_home))
    return tiny_home


def test_a_file_of_sessions_is_measured_once_and_reported(home: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "mine.jsonl", tmp_path / "results"
    bench("workload", "react", file, "--sessions", 2, "--scale", 0.03, "--roles", 2)
    measure = ["run", file, "--system", "prefillshare", "--rate", 5, "--base", "tiny-base"]
    measure += ["--max-sessions", 1]
    assert "1 of 1 points to measure" in bench(*measure, "--out", out).stderr
    assert "0 of 1 points to measure" in bench(*measure, "--out", out).stderr

    [point] = (out / "mine").glob("*.json")
    found = json.loads(point.read_text())
    assert traces.read(point.with_name(found["workload_file"])).calls == len(found["calls"])
    assert found["figures"]["calls"] == 16
    assert found["figures"]["failed_sessions"] == 0
    # Nothing twice; each of the two prefill workers has one session.
    workload = traces.read(point.with_name(found["workload_file"]))
    assert found["figures"]["prefilled_tokens"] == computed_once(workload, block_size=32)
    # What so small a workload has in use may be over before it is seen; what it leaves is not.
    assert min(worker["cached_blocks"] for worker in found["workers"]["after"]) > 0
    assert found["peaks"]["cached_blocks"] > 0
    assert found["figures"]["kv_bytes_peak"] == found["peaks"]["kv_bytes"]
    assert "agent1" in found["cluster_file"]

    page = out / "report.html"
    bench("report", out)
    assert "mine" in page.read_text()


@pytest.mark.exactness
def test_the_tokens_of_a_measurement_are_those_of_each_role_on_the_bases_kv(
    home: Path, tmp_path: Path
) -> None:
    file, out = tmp_path / "mine.jsonl", tmp_path / "results"
    bench("workload", "reflexion", file, "--sessions", 2, "--scale", 0.03, "--roles", 2)
    measure = ["run", file, "--base", "tiny-base", "--out", out, "--closed-loop", 2]
    bench(*measure, "--system", "prefillshare")
    [point] = (out / "mine").glob("*.json")
    found = json.loads(point.read_text())
    workload = traces.read(point.with_name(found["workload_file"]))
    base = store.resolve("tiny-base")
    drawn = adapters.draw("tiny-base", tmp_path, workload.roles, seed=found["adapter_seed"])
    decoders = {role: adapter.merged(base, path) for role, path in drawn.items()}
    got = {(call["session"], call["index"]): call["ids"] for call in found["calls"]}
    assert len(got) == workload.calls
    for session in workload.sessions:
        context = Context(workload, session)
        for index, call in enumerate(session.calls):
            decoder, prompt = decoders[call.role], context.prompt(index)
            expected = base_cache_greedy(base, decoder, prompt, call.answer)
            assert got[session.id, index] == expected
            context.answered(index, expected)


def test_more_roles_over_a_context_compute_and_keep_as_much_of_it(
    home: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results"
    measure = ["run", "roles_scaling", "--size", "smoke", "--base", "tiny-base", "--out", out]
    bench(*measure, "--system", "prefillshare")
    bench("report", out, "--docs", tmp_path / "docs")
    content = json.loads((tmp_path / "docs" / "roles_scaling.json").read_text())
    one, two = (row["systems"]["prefillshare"] for row in content["roles"])
    assert [row["roles"] for row in content["roles"]] == [1, 2]
    # The second role adds its own instructions, and computes the block again that is not whole.
    assert one["prefilled_tokens"] < two["prefilled_tokens"] <= one["prefilled_tokens"] + 32 + 8
    assert one["kv_prefill_bytes"] == two["kv_prefill_bytes"] > 0


def test_recorded_requests_are_run_on_ours_and_on_stock_engines(home: Path, tmp_path: Path) -> None:
    log, file, out = tmp_path / "log.jsonl", tmp_path / "mine.jsonl", tmp_path / "results"
    said = [{"role": "user", "content": "Where is the red door?"}]
    said += [{"role": "assistant", "content": "North."}, {"role": "user", "content": "And blue?"}]
    requests = [
        {"model": model, "messages": said[:length], "max_tokens": 9, "session_id": session}
        for session in ("a", "b")
        for model, length in (("org/Planner", 1), ("org/Coder", 3))
    ]
    log.write_text("".join(f"{json.dumps(request)}\n" for request in requests))
    bench("import", log, "--out", file, "--longest-answer", 6)
    measure = ["run", file, "--closed-loop", 1, "--base", "tiny-base", "--out", out]
    bench(*measure, "--system", "prefillshare", "--system", "multi_lora")

    points = sorted((out / "mine").glob("*.json"))
    assert [point.name for point in points] == [
        f"mine.{system}.limit1.0.json" for system in ("multi_lora", "prefillshare")
    ]
    stock, ours = (json.loads(point.read_text()) for point in points)
    for found in (stock, ours):
        assert [call["generated"] for call in found["calls"]] == [6, 6, 6, 6]
        assert [call["role"] for call in found["calls"]] == ["org-planner", "org-coder"] * 2
        assert found["figures"]["failed_sessions"] == 0
    assert [call["prompt_tokens"] for call in ours["calls"]] == [
        call["prompt_tokens"] for call in stock["calls"]
    ]
