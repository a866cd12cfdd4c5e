"""Every figure, on records whose values can be checked by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from prefillshare_bench.measures import (
    HIGHER_IS_BETTER,
    LOWER_IS_BETTER,
    figures,
    interval,
    load_ratio,
    prefilled_per_worker,
    ratios,
)
from prefillshare_bench.records import CallRecord, Replay
from prefillshare_bench.traces import Call, Session, Workload


@dataclass(frozen=True)
class State:
    """What is read of a worker."""

    id: str
    phase: str = "prefill"
    query_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    handoffs: int = 0
    handoff_seconds: float = 0


CALLS = (Call(role="a", new=100, tail=0, answer=5), Call(role="b", new=95, tail=0, answer=5))
WORKLOAD = Workload(
    name="w",
    roles=("a", "b"),
    sessions=tuple(Session(id=f"s{n}", arrival=n, calls=CALLS) for n in range(3)),
)


def record(session: str, index: int, arrived: float, ttft: float, step: float) -> CallRecord:
    """A call of five tokens; its first one took `ttft` s, each other one `step` s."""
    first = arrived + ttft
    return CallRecord(
        session=session,
        index=index,
        role="ab"[index],
        arrived_s=arrived,
        sent_s=arrived,
        first_s=first,
        last_s=first + 4 * step,
        itl_ms=[1000 * step] * 4,
        prompt_tokens=100 * (index + 1),
        cached_tokens=0,
        computed_tokens=100,
        generated=5,
        handoff_bytes=1000,
        prefill_worker="p0",
        decode_worker="d0",
        status=200,
    )


DONE = [
    record("s0", 0, 0.0, 1.0, 0.25),  # 2 s
    record("s0", 1, 2.0, 2.0, 0.5),  # 4 s, the session 6 s
    record("s1", 0, 1.0, 3.0, 0.25),  # 4 s
    record("s1", 1, 5.0, 2.0, 1.0),  # 6 s, the session 10 s
]
REFUSED = replace(
    DONE[0], session="s2", arrived_s=2.0, first_s=None, last_s=2.5, itl_ms=[], prompt_tokens=None,
    generated=0, handoff_bytes=None, status=429, error="queue_full",
)  # fmt: skip
BEFORE = [
    State("p0", query_tokens=1000, hit_tokens=900, preemptions=1),
    State("d0", "decode", handoffs=3, handoff_seconds=9),
]
AFTER = [
    State("p0", query_tokens=1500, hit_tokens=1100, preemptions=1),
    State("p1", query_tokens=110, hit_tokens=10),
    State("d0", "decode", 700, 600, preemptions=3, handoffs=7, handoff_seconds=12),
]
EXPECTED = {
    "mean_s": 4.0,
    "p50_s": 4.0,
    "p95_s": 5.7,  # Of 2, 4, 4, 6: 85% of the way from the third to the last.
    "p99_s": 5.94,
    "session_mean_s": 8.0,
    "session_p50_s": 8.0,
    "session_p95_s": 9.8,
    "session_p99_s": 9.96,
    "ttft_ms": 2000.0,
    "ttft_p50_ms": 2000.0,
    "ttft_p95_ms": 2850.0,
    "ttft_p99_ms": 2970.0,
    "tpot_ms": 500.0,  # Of 250, 500, 250, 1000.
    "itl_p50_ms": 375.0,
    "itl_p95_ms": 1000.0,
    "itl_p99_ms": 1000.0,
    "throughput_tok_s": 62.0,  # 600 prompt tokens and 20 generated ones in 10 s.
    "generated_tok_s": 2.0,
    "hit_rate": round(210 / 610, 6),
    "prefilled_tokens": 400,
    "prefilled_per_worker": {"p0": 300, "p1": 100},
    "load_ratio": 3.0,
    "recompute_amplification": 1.0,  # 100 and 100 of each of two sessions.
    "handoff_bytes": 4000,
    "handoff_ms": 750.0,
    "kv_bytes_peak": 4096,
    "preemptions": 3,
    "rejected_sessions": 1,
    "failed_sessions": 0,
    "sessions": 3,
    "calls": 4,
    "wall_s": 10.0,
}


def measured(calls: list[CallRecord], wall_s: float = 10.0, **options: Any) -> dict[str, Any]:
    run = Replay(calls, wall_s)
    return figures(run, BEFORE, AFTER, workload=WORKLOAD, kv_bytes_peak=4096, **options)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_figure_is_what_it_is_by_hand(name: str) -> None:
    assert measured([*DONE, REFUSED])[name] == EXPECTED[name]


def test_there_is_no_figure_but_these() -> None:
    assert measured([*DONE, REFUSED]).keys() == EXPECTED.keys()


def test_a_session_that_broke_off_failed_and_its_latency_counts_for_nothing() -> None:
    broken = replace(DONE[3], error="engine died", status=503)
    found = measured([*DONE[:3], broken])
    assert (found["failed_sessions"], found["rejected_sessions"]) == (1, 0)
    assert found["session_mean_s"] == 6.0
    assert (found["calls"], found["mean_s"]) == (3, pytest.approx(10 / 3, abs=1e-6))


def test_what_was_never_measured_is_none() -> None:
    run = Replay([REFUSED], 0.0)
    found = figures(run, [], [], workload=WORKLOAD)
    none = {name for name, value in found.items() if value is None}
    assert none == EXPECTED.keys() - {
        *("prefilled_per_worker", "preemptions", "rejected_sessions"),
        *("failed_sessions", "sessions", "calls", "wall_s"),
    }


def test_tokens_that_whole_blocks_cannot_keep_are_no_recomputation() -> None:
    # Of the 100 tokens of a first prompt a cache keeps 96, so the second one computes 104.
    assert measured(DONE, block_size=32)["recompute_amplification"] == round(400 / 408, 6)


def test_the_head_of_all_sessions_is_needed_once() -> None:
    # 32 tokens of head and 100 and 95 + 5 more of each of two sessions, in blocks of 4.
    with_head = WORKLOAD.model_copy(update={"head": 32})
    found = figures(Replay(DONE, 10.0), BEFORE, AFTER, workload=with_head, block_size=4)
    assert found["recompute_amplification"] == round(400 / (132 + 100 + 100 + 100), 6)


def test_a_worker_that_began_anew_counts_from_its_start() -> None:
    before = [State("p0", query_tokens=1000, hit_tokens=900)]
    after = [State("p0", query_tokens=50, hit_tokens=10)]
    assert prefilled_per_worker(before, after) == {"p0": 40}


@pytest.mark.parametrize(
    ("prefilled", "ratio"),
    [([10], None), ([10, 10], 1.0), ([30, 10, 20], 3.0), ([30, 0], None), ([], None)],
)
def test_the_load_ratio_is_of_the_most_and_the_least(
    prefilled: list[int], ratio: float | None
) -> None:
    assert load_ratio(prefilled) == ratio


def test_an_interval_holds_the_mean_and_is_the_same_again() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    low, high = interval(values)
    assert 1.5 < low < 2.2 < 3.0 < 3.8 < high < 4.5
    assert interval(values) == (low, high)
    assert interval([7.0]) == (7.0, 7.0)
    with pytest.raises(ValueError, match="values is empty"):
        interval([])


@pytest.mark.parametrize(
    ("name", "ours", "theirs", "ratio"),
    [
        ("p95_s", 2.0, 9.0, 4.5),
        ("prefilled_tokens", 700, 9800, 14.0),
        ("ttft_ms", 200.0, 100.0, 0.5),
        ("throughput_tok_s", 60.0, 30.0, 2.0),
        ("hit_rate", 0.9, 0.2, 4.5),
        ("preemptions", 0, 0, 1.0),
        ("preemptions", 0, 4, None),
        ("preemptions", 4, 0, None),
        ("handoff_bytes", 1000, None, None),
    ],
)
def test_a_ratio_above_one_says_that_ours_is_better(
    name: str, ours: float, theirs: float | None, ratio: float | None
) -> None:
    assert ratios({name: ours}, {name: theirs})[name] == ratio


def test_every_figure_that_can_be_better_has_a_direction() -> None:
    directed = {*LOWER_IS_BETTER, *HIGHER_IS_BETTER}
    undirected = {"prefilled_per_worker", "failed_sessions", "sessions", "calls", "wall_s"}
    assert directed | undirected == EXPECTED.keys()
    assert ratios(EXPECTED, EXPECTED) == dict.fromkeys((*LOWER_IS_BETTER, *HIGHER_IS_BETTER), 1.0)
