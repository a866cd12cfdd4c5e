"""Where calls go."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillshare_server.router.placement import AVOID_S, Placement
from prefillshare_server.router.topology import WorkerEndpoint


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def worker(worker_id: str, role: str | None = None) -> WorkerEndpoint:
    return WorkerEndpoint(worker_id, "decode" if role else "prefill", role, "http://w", "m")


def placement(
    *, pinned: Counter[str] | None = None, hard: bool = False, clock: Clock | None = None
) -> Placement:
    workers = [worker("p0"), worker("p1"), worker("a0", "a"), worker("a1", "a"), worker("b0", "b")]
    return Placement(
        workers,
        pinned if pinned is not None else Counter(),
        affinity="hard" if hard else "soft",
        clock=clock or Clock(),
    )


def placed(
    where: Placement, pin: str | None, *, tried: str | None = None
) -> tuple[str, str] | None:
    found = where.place_prefill(pin, sessionless=False, tried=tried)
    return (found.worker.id, found.affinity) if found else None


def test_a_pinned_session_stays_however_busy_its_worker_is() -> None:
    where = placement()
    with where.prefill_load(where.prefill[0], 10_000):
        assert placed(where, "p0") == ("p0", "hit")


def test_a_new_session_goes_where_the_fewest_tokens_wait() -> None:
    where = placement(pinned=Counter(p1=100))
    with where.prefill_load(where.prefill[0], 10):
        assert placed(where, None) == ("p1", "new")
    assert placed(where, None) == ("p0", "new")


def test_equal_load_is_broken_by_the_number_of_pinned_sessions() -> None:
    assert placed(placement(pinned=Counter(p0=1)), None) == ("p1", "new")


def test_a_call_without_a_session_is_placed_alike_and_claims_no_affinity() -> None:
    found = placement(pinned=Counter(p0=1)).place_prefill(None, sessionless=True)
    assert found is not None
    assert (found.worker.id, found.affinity) == ("p1", "none")


def test_a_soft_pin_gives_way_to_another_worker_and_a_hard_one_does_not() -> None:
    assert placed(placement(), "p0", tried="p0") == ("p1", "rebound")
    assert placed(placement(hard=True), "p0", tried="p0") is None


def test_an_unreachable_worker_is_passed_over_for_a_while() -> None:
    clock = Clock()
    where = placement(clock=clock)
    where.unreachable(where.prefill[0])
    assert placed(where, "p0") == ("p1", "rebound")
    assert placed(where, None) == ("p1", "new")
    clock.now += AVOID_S
    assert placed(where, "p0") == ("p0", "hit")


def test_where_all_were_unreachable_one_is_tried_again() -> None:
    where = placement()
    for prefill in where.prefill:
        where.unreachable(prefill)
    assert placed(where, None) == ("p0", "new")
    assert placed(where, "p1") == ("p0", "rebound")


def test_the_only_worker_is_not_tried_twice() -> None:
    where = Placement([worker("p0")], Counter(), affinity="soft")
    assert placed(where, None, tried="p0") is None


def test_decode_goes_to_the_replica_with_the_fewest_calls() -> None:
    where = placement()
    with where.decode_load(where.decode["a"][0]):
        assert where.place_decode("a", last="a0").id == "a1"


def test_among_equals_the_replica_that_served_the_session_last_is_kept() -> None:
    assert placement().place_decode("a", last="a1").id == "a1"
    assert placement().place_decode("a", last=None).id == "a0"


def test_loads_are_given_back_after_an_error() -> None:
    where = placement()
    with (
        pytest.raises(RuntimeError),
        where.decode_load(where.decode["a"][0]),
        where.prefill_load(where.prefill[0], 5),
    ):
        raise RuntimeError
    assert where.decoding.total() == where.prefilling.total() == 0


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40))
def test_no_worker_is_ever_two_prompts_ahead_of_another(prompts: list[int]) -> None:
    """New sessions arriving at once spread by what they bring, not by their number."""
    where = placement()
    for tokens in prompts:
        found = where.place_prefill(None, sessionless=True)
        assert found is not None
        where.prefilling[found.worker.id] += tokens
    assert abs(where.prefilling["p0"] - where.prefilling["p1"]) <= max(prompts)


def test_a_replica_that_was_just_unreachable_is_passed_over() -> None:
    where = placement()
    [a0, a1] = where.decode["a"]
    where.unreachable(a0)
    with where.decode_load(a1):
        assert where.place_decode("a", last="a0") is a1
    where.unreachable(a1)
    # With none left, one may be back.
    assert where.place_decode("a", last="a0") is a0
