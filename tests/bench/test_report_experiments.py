"""The results files of the other experiments: shape, values, and what is missing."""

from pathlib import Path
from typing import Any

import pytest

from prefillshare_bench import traces, workloads
from prefillshare_bench.report import files
from prefillshare_bench.report.points import read
from prefillshare_bench.report.sections import sections
from tests.bench import folders


def result(folder: Path, name: str) -> dict[str, Any]:
    return files.results(read(folder))[name]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of a folder that holds everything."""
    return files.results(read(folders.whole(tmp_path_factory.mktemp("points"))))


def test_every_file_says_what_measured_it(found: dict[str, dict[str, Any]]) -> None:
    assert list(found) == list(files.FILES)
    needed = {"machine", "command", "date", "workloads"}
    assert all(content["about"].keys() >= needed for content in found.values())


def test_attribution_has_the_three_rows_of_table_6(found: dict[str, dict[str, Any]]) -> None:
    rows = found["attribution"]["rows"]
    assert [row["system"] for row in rows] == ["per_model", "shared_pool", "prefillshare"]
    ours = {
        "mean_ttft_s": 0.25,
        "session_p95_s": 10,
        "p95_s": 1,
        "throughput_tok_s": 4000,
        "local_prefill_tokens": 3000,
        "hit_percent": 80,
    }
    assert {name: rows[-1][name] for name in ours} == ours
    assert rows[0]["paper"]["session_p95_s"] == 322.60


def test_attributions_ratios_stand_beside_the_papers(found: dict[str, dict[str, Any]]) -> None:
    ratios = found["attribution"]["ratios"]["per_model"]
    theirs = found["attribution"]["paper_ratios"]["per_model"]
    assert (ratios["local_prefill_tokens"], ratios["hit_percent"]) == (4, 4)
    assert theirs["local_prefill_tokens"] == pytest.approx(9.56 / 0.68, abs=1e-3)
    assert theirs["throughput_tok_s"] == pytest.approx(63.13 / 28.68, abs=1e-3)


def test_a_row_without_points_is_missing(tmp_path: Path) -> None:
    folders.point(tmp_path, "attribution", "prefillshare")
    folders.point(tmp_path, "attribution", "per_model")
    content = result(tmp_path, "attribution")
    assert content["missing"] == ["shared_pool"]
    assert content["rows"][1]["throughput_tok_s"] is None
    assert list(content["ratios"]) == ["per_model"]


def test_a_load_that_none_survives_is_told_of_as_such(tmp_path: Path) -> None:
    lost = folders.figures(rejected_sessions=1)
    for system in ("per_model", "shared_pool", "prefillshare"):
        folders.point(tmp_path, "attribution", system, measured=lost)
    assert {row["survived"] for row in result(tmp_path, "attribution")["rows"]} == {False}


def test_prediction_takes_the_rows_it_shares_from_attribution(tmp_path: Path) -> None:
    folders.point(tmp_path, "prediction", "predictive", name="react")
    for system in ("per_model", "shared_pool", "prefillshare"):
        folders.point(tmp_path, "attribution", system, name="react")
    content = result(tmp_path, "prediction")
    assert [row["system"] for row in content["rows"]] == ["per_model", "predictive", "prefillshare"]
    assert content["missing"] == []


def test_prediction_takes_no_rows_of_another_workload(tmp_path: Path) -> None:
    folders.point(tmp_path, "prediction", "predictive", name="react")
    folders.point(tmp_path, "attribution", "per_model", name="reflexion")
    assert result(tmp_path, "prediction")["missing"] == ["per_model", "prefillshare"]


def test_low_overlap_has_loads_and_the_tokens_of_each_worker(
    found: dict[str, dict[str, Any]],
) -> None:
    content = found["low_overlap"]
    assert [row["rate"] for row in content["loads"]] == [0.1, 0.2]
    assert content["loads"][1]["ratios"]["per_model"]["p95_s"] == 4
    workers = content["workers"]["systems"]["per_model"]
    assert workers["prefilled_per_worker"] == {"prefill-0": 8000, "prefill-1": 4000}
    assert workers["roles"] == {"prefill-0": "main", "prefill-1": "A"}
    assert content["paper"]["loads"][2]["prefillshare"]["throughput_tok_s"] == 33_900


def test_low_overlap_tells_what_each_role_had_computed_again(tmp_path: Path) -> None:
    workload = workloads.supervisor(sessions=1, roles=2, scale=0.1)
    once = workload.sessions[0].prefill_tokens(workload.head, per_role=True, block_size=16)
    assert once is not None
    # The main agent calls twice, its specialist once in between.
    computed = (once[0] * 3, once[1], once[2] * 3)
    calls = [
        folders.call("s0", index, role=call.role, computed_tokens=tokens)
        for index, (call, tokens) in enumerate(
            zip(workload.sessions[0].calls, computed, strict=True)
        )
    ]
    folders.point(tmp_path, "low_overlap", "per_model", name="supervisor", calls=calls)
    traces.write(workload, tmp_path / "low_overlap" / "supervisor.jsonl")
    content = files.results(read(tmp_path))
    workers = content["low_overlap"]["workers"]["systems"]["per_model"]
    assert workers["recompute_amplification_by_role"] == {"main": 3, "sub1": 1}
    assert any("main: 3, sub1: 1" in str(section.tables) for section in sections(content))
    assert any("main: 7.55" in str(section.tables) for section in sections(content))
    lengths = workload.sessions[0].prompt_tokens(workload.head) or []
    assert content["low_overlap"]["overlap"] == round(3 * workload.head / sum(lengths), 6)


def test_low_overlap_in_a_closed_loop_is_told_of_by_its_limit(tmp_path: Path) -> None:
    folders.point(tmp_path, "low_overlap", "prefillshare", rate=None, limit=4)
    content = files.results(read(tmp_path))
    assert content["low_overlap"]["workers"]["load"] == {"limit": 4}
    assert any("at 4 sessions at once" in str(section.tables) for section in sections(content))


def test_input_lengths_are_those_of_the_workloads_names(found: dict[str, dict[str, Any]]) -> None:
    rows = found["input_length"]["lengths"]
    assert [row["input_length"] for row in rows] == [64, 4096]
    assert rows[0]["prompt_tokens"] == 100
    assert rows[1]["ratios"]["per_model"]["ttft_ms"] == 4


def test_concurrency_has_a_row_for_each_limit_and_the_best_one(tmp_path: Path) -> None:
    for limit, throughput in ((1, 100), (4, 300), (16, 200)):
        measured = folders.figures(throughput_tok_s=throughput)
        folders.point(
            tmp_path, "concurrency", "per_model", rate=4, max_sessions=limit, measured=measured
        )
    content = result(tmp_path, "concurrency")
    assert [row["limit"] for row in content["limits"]] == [1, 4, 16]
    assert content["peaks"]["per_model"]["limit"] == 4


def test_what_is_missing_is_what_the_experiment_is_about(tmp_path: Path) -> None:
    folders.point(tmp_path, "swarm", "prefillshare")
    assert result(tmp_path, "swarm")["missing"] == ["per_model"]


def test_roles_scaling_tells_how_each_system_grows(tmp_path: Path) -> None:
    for count in (1, 4):
        for system, tokens in (("prefillshare", 100), ("per_model", 100 * count)):
            folders.point(
                tmp_path,
                "roles_scaling",
                system,
                name=f"roles_{count}",
                roles=[str(number) for number in range(count)],
                measured=folders.figures(prefilled_tokens=tokens),
            )
    content = result(tmp_path, "roles_scaling")
    assert [row["roles"] for row in content["roles"]] == [1, 4]
    growth = {system: own["prefilled_tokens"] for system, own in content["growth"].items()}
    assert growth == {"prefillshare": 1, "per_model": 4}


def test_swarm_has_the_papers_table_beside_its_loads(found: dict[str, dict[str, Any]]) -> None:
    assert found["swarm"]["loads"][0]["ratios"]["per_model"]["ttft_ms"] == 4
    assert found["swarm"]["paper"]["loads"][2]["per_model"]["ttft_ms"] == 733


def test_memory_is_the_cached_blocks_that_the_workload_left(tmp_path: Path) -> None:
    folders.point(
        tmp_path,
        "memory",
        "prefillshare",
        workers={"before": folders.workers(1), "after": folders.workers(3)},
    )
    folders.point(
        tmp_path,
        "memory",
        "per_model",
        workers={"before": folders.workers(1), "after": folders.workers(9)},
    )
    content = result(tmp_path, "memory")
    # Two of the three workers prefill; there are two sessions.
    assert content["systems"]["prefillshare"]["kv_bytes"] == 2 * 2 * folders.BLOCK_BYTES
    assert content["systems"]["prefillshare"]["kv_bytes_per_session"] == 2 * folders.BLOCK_BYTES
    ratios = content["ratios"]["per_model"]
    assert ratios == {"kv_bytes": 4, "kv_bytes_per_session": 4, "memory_bytes": 1}


def test_memory_of_a_cache_that_is_full_is_unknown(tmp_path: Path) -> None:
    full = [{**worker, "blocks": 9} for worker in folders.workers(9)]
    folders.point(
        tmp_path, "memory", "per_model", workers={"before": folders.workers(1), "after": full}
    )
    assert result(tmp_path, "memory")["systems"]["per_model"]["kv_bytes"] is None


def test_kv_of_many_roles_is_what_is_kept_and_not_what_is_in_use(tmp_path: Path) -> None:
    for roles, kept in ((1, 3), (2, 5)):
        folders.point(
            tmp_path,
            "roles_scaling",
            "per_model",
            name=f"roles_{roles}",
            roles=[f"agent{n}" for n in range(roles)],
            workers={"before": folders.workers(1), "after": folders.workers(kept)},
        )
    found = result(tmp_path, "roles_scaling")
    rows = [row["systems"]["per_model"] for row in found["roles"]]
    assert [row["kv_prefill_bytes"] / folders.BLOCK_BYTES for row in rows] == [4, 8]
    assert [row["kv_kept_bytes"] / folders.BLOCK_BYTES for row in rows] == [6, 12]
    assert found["growth"]["per_model"]["kv_prefill_bytes"] == 2


def test_memory_that_an_engine_does_not_tell_is_unknown(tmp_path: Path) -> None:
    workers = {"before": folders.workers(None), "after": folders.workers(None)}
    folders.point(tmp_path, "memory", "aggregated", workers=workers)
    assert result(tmp_path, "memory")["systems"]["aggregated"]["kv_bytes"] is None
