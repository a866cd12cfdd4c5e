"""The paper's workloads: who is called, and over how much."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefillshare_bench import workloads
from prefillshare_bench.experiments import BLOCK
from prefillshare_bench.traces import Call, Session, Workload
from tests.bench.conftest import computed_once

BUILDS: list[Callable[..., Workload]] = [
    workloads.react,
    workloads.reflexion,
    workloads.swarm,
    workloads.supervisor,
    workloads.long_output,
    partial(workloads.input_length, 4096),
    partial(workloads.roles_scaling, 8),
]
PROPERTY = settings(deadline=None, max_examples=40)


def calls(session: Session) -> list[Call]:
    assert all(isinstance(call, Call) for call in session.calls)
    return [call for call in session.calls if isinstance(call, Call)]


@PROPERTY
@given(st.sampled_from(BUILDS), st.integers(1, 6), st.integers(), st.floats(0.01, 2))
def test_the_same_seed_draws_the_same_workload(
    build: Callable[..., Workload], sessions: int, seed: int, scale: float
) -> None:
    made = build(sessions=sessions, seed=seed, scale=scale)
    assert made == build(sessions=sessions, seed=seed, scale=scale)
    assert len(made.sessions) == sessions


@PROPERTY
@given(st.sampled_from(BUILDS), st.integers())
def test_sessions_arrive_one_after_the_other(build: Callable[..., Workload], seed: int) -> None:
    times = [session.arrival for session in build(sessions=20, seed=seed, scale=0.01).sessions]
    assert all(before < after for before, after in pairwise([0.0, *times]))


def test_one_session_arrives_per_unit_of_time() -> None:
    assert workloads.arrivals(20_000, 0)[-1] == pytest.approx(20_000, rel=0.03)


@PROPERTY
@given(st.sampled_from(BUILDS), st.floats(0.001, 4))
def test_a_scale_multiplies_every_length_and_leaves_a_token(
    build: Callable[..., Workload], scale: float
) -> None:
    whole, scaled = build(sessions=1), build(sessions=1, scale=scale)
    for full, small in zip(calls(whole.sessions[0]), calls(scaled.sessions[0]), strict=True):
        for name in ("new", "tail", "answer"):
            length = getattr(full, name)
            assert getattr(small, name) == (max(1, round(length * scale)) if length else 0)


def test_react_and_reflexion_call_four_agents_in_turn_four_times() -> None:
    for build in (workloads.react, workloads.reflexion):
        [session] = build(sessions=1).sessions
        assert [call.role for call in session.calls] == [
            f"agent{number}" for number in (1, 2, 3, 4)
        ] * 4


def test_react_reads_more_than_it_writes_and_reflexion_writes_more() -> None:
    react, reflexion = (
        calls(build(sessions=1).sessions[0])[1:] for build in (workloads.react, workloads.reflexion)
    )
    assert sum(call.new for call in react) > 4 * sum(call.answer for call in react)
    assert sum(call.answer for call in reflexion) > 2 * sum(call.new for call in reflexion)


def test_papers_size_shares_what_the_papers_hit_rate_says() -> None:
    # Fig. 8: near 89% of the tokens looked up are found, whatever the concurrency.
    for build in (workloads.react, workloads.reflexion):
        workload = build(sessions=1)
        prompts = workload.sessions[0].prompt_tokens(workload.head)
        computed = computed_once(workload, block_size=16)
        assert prompts is not None
        assert computed is not None
        assert 1 - computed / sum(prompts) == pytest.approx(0.89, abs=0.01)


@PROPERTY
@given(st.integers(), st.integers(2, 6))
def test_a_swarm_never_hands_over_to_the_same_agent(seed: int, roles: int) -> None:
    made = workloads.swarm(sessions=5, seed=seed, scale=0.01, roles=roles)
    for session in made.sessions:
        assert len(session.calls) == 4 * roles
        assert all(one.role != other.role for one, other in pairwise(session.calls))


def test_a_swarms_sessions_take_ways_of_their_own() -> None:
    made = workloads.swarm(sessions=5, scale=0.01)
    assert len({tuple(call.role for call in session.calls) for session in made.sessions}) == 5


def test_a_supervisor_is_called_around_each_specialist() -> None:
    [session] = workloads.supervisor(sessions=1).sessions
    order = ["main", "sub1", "main", "sub2", "main", "sub3", "main"]
    assert [call.role for call in session.calls] == order
    assert all(call.history == call.role for call in calls(session))


def test_supervised_prompts_have_the_papers_mean_length_and_share_its_block() -> None:
    workload = workloads.supervisor(sessions=1)
    prompts = workload.sessions[0].prompt_tokens(workload.head)
    assert prompts is not None
    assert sum(prompts) / len(prompts) == pytest.approx(8145, abs=1)
    assert workload.head == BLOCK


@pytest.mark.parametrize("tokens", [64, 4096])
def test_the_first_input_has_the_length_that_was_asked_for(tokens: int) -> None:
    workload = workloads.input_length(tokens, sessions=1)
    prompts = workload.sessions[0].prompt_tokens(workload.head)
    assert prompts is not None
    assert prompts[0] == tokens
    assert len(prompts) == 4


def test_what_is_computed_for_one_context_hardly_grows_with_the_roles() -> None:
    one, eight = (computed_once(workloads.roles_scaling(roles, sessions=1)) for roles in (1, 8))
    assert one == 32 + 4096 + 8
    assert eight == one + 7 * 8


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (partial(workloads.supervisor, sessions=1, roles=1), "roles is 1"),
        (partial(workloads.input_length, 8, sessions=1), "tokens is 8"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(build: Callable[[], Workload], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build()
