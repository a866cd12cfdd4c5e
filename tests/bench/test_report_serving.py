"""serving_react.json: which load is told of, and how many times better PrefillShare is there."""

from pathlib import Path
from typing import Any

import pytest

from prefillshare_bench import traces, workloads
from prefillshare_bench.report import files
from prefillshare_bench.report.points import read
from prefillshare_server.errors import ConfigError
from tests.bench import folders

NAMED = {
    "p50_s",
    "p95_s",
    "throughput_tok_s",
    "ttft_ms",
    "prefilled_tokens",
    "hit_rate",
    "load_ratio",
    "preemptions",
}


def serving(folder: Path) -> dict[str, Any]:
    return files.results(read(folder))["serving_react"]


def two(folder: Path, *, ours: float = 4, **others: Any) -> None:
    """PrefillShare, `ours` times as good, and the baseline, under one load."""
    folders.point(folder, "react", "prefillshare", measured=folders.figures(ours), **others)
    folders.point(folder, "react", "per_model", **others)


def test_every_system_has_the_named_measures(tmp_path: Path) -> None:
    for system in folders.ALL:
        folders.point(tmp_path, "react", system)
    found = serving(tmp_path)
    assert all(found[system].keys() >= NAMED for system in folders.ALL)


def test_reflexion_has_a_file_of_its_own_with_the_papers_ratios(tmp_path: Path) -> None:
    folders.point(tmp_path, "reflexion", "prefillshare")
    found = files.results(read(tmp_path))["serving_reflexion"]
    assert found["paper"]["ratios_up_to"]["per_model"] == {"p95": 4.5, "throughput_tok_s": 2.0}


@pytest.mark.parametrize(
    "measure", ["p95_s", "session_p95_s", "ttft_ms", "prefilled_tokens", "throughput_tok_s"]
)
def test_a_ratio_above_one_says_that_prefillshare_is_better(tmp_path: Path, measure: str) -> None:
    two(tmp_path, ours=4)
    assert serving(tmp_path)["ratios"]["per_model"][measure] == 4


@pytest.mark.parametrize("measure", ["p95_s", "throughput_tok_s", "hit_rate", "prefilled_tokens"])
def test_a_ratio_below_one_says_that_it_is_worse(tmp_path: Path, measure: str) -> None:
    two(tmp_path, ours=0.5)
    assert serving(tmp_path)["ratios"]["per_model"][measure] == 0.5


def test_no_preemptions_on_either_side_are_equal(tmp_path: Path) -> None:
    two(tmp_path)
    assert serving(tmp_path)["ratios"]["per_model"]["preemptions"] == 1


def test_preemptions_that_only_a_baseline_has_are_no_multiple_of_none(tmp_path: Path) -> None:
    two(tmp_path)
    folders.point(tmp_path, "react", "shared_pool", measured=folders.figures(preemptions=5))
    assert serving(tmp_path)["ratios"]["shared_pool"]["preemptions"] is None


def test_the_figures_are_those_of_the_highest_load(tmp_path: Path) -> None:
    two(tmp_path, ours=4, rate=0.1)
    two(tmp_path, ours=2, rate=0.4)
    found = serving(tmp_path)
    assert (found["load"], found["ratios"]["per_model"]["p95_s"]) == ({"rate": 0.4}, 2)


@pytest.mark.parametrize(
    "lost",
    [
        {"calls": [folders.call("s0", 0), folders.call("s1", 0, status=429, error="full")]},
        {"calls": [folders.call("s0", 0, error="connection lost")]},
        {"calls": []},
        {"measured": folders.figures(rejected_sessions=1)},
        {"measured": folders.figures(failed_sessions=1)},
    ],
    ids=["refused", "broken", "nothing", "rejected", "failed"],
)
def test_a_load_that_one_system_does_not_survive_is_not_told_of(
    tmp_path: Path, lost: dict[str, Any]
) -> None:
    two(tmp_path, rate=0.1)
    folders.point(tmp_path, "react", "prefillshare", rate=0.4)
    folders.point(tmp_path, "react", "per_model", rate=0.4, **lost)
    found = serving(tmp_path)
    assert (found["load"], found["not_survived"]) == ({"rate": 0.1}, {"per_model": [0.4]})


def test_calls_that_were_never_made_are_found_by_the_workload_file(tmp_path: Path) -> None:
    two(tmp_path, rate=0.1)
    # Two sessions of two calls were measured.
    workload = workloads.react(sessions=2, roles=2, rounds=2)
    traces.write(workload, tmp_path / "react" / "react.jsonl")
    assert serving(tmp_path)["load"] is None


def test_one_lost_repeat_loses_the_load(tmp_path: Path) -> None:
    two(tmp_path, repeat=0)
    two(tmp_path, repeat=1, calls=[folders.call("s0", 0, status=503, error="full")])
    assert serving(tmp_path)["load"] is None


def test_without_a_common_load_systems_are_there_and_unknown(tmp_path: Path) -> None:
    folders.point(tmp_path, "react", "prefillshare", rate=0.1)
    folders.point(tmp_path, "react", "per_model", rate=0.2)
    found = serving(tmp_path)
    assert (found["prefillshare"], found["per_model"], found["ratios"]) == (None, None, {})
    assert [row["rate"] for row in found["loads"]] == [0.1, 0.2]


def test_systems_without_points_are_named_as_missing(tmp_path: Path) -> None:
    two(tmp_path)
    assert serving(tmp_path)["missing"] == [
        "shared_pool",
        "predictive",
        "aggregated",
        "multi_lora",
    ]


def test_baselines_alone_have_no_ratios(tmp_path: Path) -> None:
    folders.point(tmp_path, "react", "per_model")
    found = serving(tmp_path)
    assert (found["ratios"], found["per_model"]["p95_s"]) == ({}, 4)


def test_repeats_are_averaged(tmp_path: Path) -> None:
    for repeat, better in enumerate((1, 4)):
        measured = folders.figures(better)
        folders.point(tmp_path, "react", "prefillshare", repeat=repeat, measured=measured)
    assert serving(tmp_path)["prefillshare"]["p95_s"] == 2.5


def test_one_repeat_has_intervals_of_latencies_over_its_sessions(tmp_path: Path) -> None:
    def calls(slower: float) -> list[dict[str, Any]]:
        return [
            folders.call(
                f"s{n}", at, arrived_s=n, first_s=n + slower * (1 + n), last_s=n + slower * (2 + n)
            )
            for n in range(4)
            for at in (0, 1)
        ]

    folders.point(tmp_path, "react", "prefillshare", calls=calls(1))
    folders.point(tmp_path, "react", "per_model", calls=calls(3))
    found = serving(tmp_path)
    # Each session is three times as slow, so every draw of sessions is.
    assert found["ratios_ci95"]["per_model"]["ttft_ms"] == [3, 3]
    low, high = found["ci95"]["prefillshare"]["ttft_ms"]
    assert 1000 <= low < 2500 < high <= 4000
    low, high = found["ci95"]["prefillshare"]["session_p95_s"]
    assert 2 <= low < high <= 5
    assert "throughput_tok_s" not in found["ci95"]["prefillshare"]


def test_sessions_of_different_lengths_have_an_interval_too(tmp_path: Path) -> None:
    calls = [folders.call("s0", 0), folders.call("s1", 0), folders.call("s1", 1, last_s=9)]
    folders.point(tmp_path, "react", "prefillshare", calls=calls)
    assert serving(tmp_path)["ci95"]["prefillshare"]["mean_s"] == [2, 5.5]


def test_one_point_twice_is_refused(tmp_path: Path) -> None:
    file = folders.point(tmp_path, "react", "prefillshare")
    file.with_name("copy.json").write_text(file.read_text())
    with pytest.raises(ConfigError, match="is the same measurement as"):
        read(tmp_path)


def test_rates_and_closed_loops_are_refused_together(tmp_path: Path) -> None:
    folders.point(tmp_path, "memory", "prefillshare", rate=None, limit=1)
    folders.point(tmp_path, "react", "prefillshare", rate=1)
    assert len(read(tmp_path)) == 2
    folders.point(tmp_path, "react", "per_model", rate=None, limit=1)
    with pytest.raises(ConfigError, match="react: was measured at rates"):
        read(tmp_path)


def test_a_single_session_has_no_interval(tmp_path: Path) -> None:
    calls = [folders.call("s0", 0), folders.call("s0", 1)]
    folders.point(tmp_path, "react", "prefillshare", calls=calls)
    folders.point(tmp_path, "react", "per_model", calls=calls)
    assert serving(tmp_path)["ratios_ci95"] == {}


def test_the_interval_holds_the_ratios_of_the_repeats(tmp_path: Path) -> None:
    for repeat, ours in enumerate((3, 4, 5)):
        two(tmp_path, ours=ours, repeat=repeat)
    found = serving(tmp_path)
    low, high = found["ratios_ci95"]["per_model"]["throughput_tok_s"]
    assert 3 <= low < found["ratios"]["per_model"]["throughput_tok_s"] < high <= 5


def test_of_several_limits_each_systems_best_one_counts(tmp_path: Path) -> None:
    for limit, better in ((2, 1), (8, 4), (32, 2)):
        measured = folders.figures(better)
        folders.point(tmp_path, "react", "prefillshare", max_sessions=limit, measured=measured)
    assert serving(tmp_path)["prefillshare"]["limit"] == 8


def test_a_limit_that_loses_sessions_is_not_the_best(tmp_path: Path) -> None:
    folders.point(tmp_path, "react", "prefillshare", max_sessions=2)
    lost = folders.figures(9, rejected_sessions=3)
    folders.point(tmp_path, "react", "prefillshare", max_sessions=8, measured=lost)
    assert serving(tmp_path)["prefillshare"]["limit"] == 2


def test_a_closed_loops_load_is_its_sessions_at_once(tmp_path: Path) -> None:
    two(tmp_path, rate=None, limit=2)
    two(tmp_path, rate=None, limit=8)
    assert serving(tmp_path)["load"] == {"limit": 8}


def test_the_best_ratio_may_be_at_a_lower_load(tmp_path: Path) -> None:
    two(tmp_path, ours=4, rate=0.1)
    two(tmp_path, ours=2, rate=0.4)
    assert serving(tmp_path)["up_to"]["per_model"]["p95_s"] == {"ratio": 4, "rate": 0.1}


def test_about_says_how_to_measure_again(tmp_path: Path) -> None:
    two(tmp_path)
    about = serving(tmp_path)["about"]
    assert about["machine"] == folders.MACHINE
    assert about["command"] == "prefillshare bench run react"
    assert about["date"] == "2026-01-02T03:04:05Z"
    assert about["workloads"][0]["sha256"].startswith("react")


def test_every_limit_that_was_tried_is_told_of(tmp_path: Path) -> None:
    for limit, better in ((None, 1), (2, 4)):
        measured = folders.figures(better)
        folders.point(tmp_path, "react", "per_model", max_sessions=limit, measured=measured)
    tried = serving(tmp_path)["tried"]
    assert [(row["system"], row["rate"], row["limit"], row["p95_s"]) for row in tried] == [
        ("per_model", 0.2, None, 4),
        ("per_model", 0.2, 2, 1),
    ]
