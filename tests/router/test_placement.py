"""Where prefills go."""

from collections import Counter
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillshare_server.router.placement import Placement
from prefillshare_server.router.topology import WorkerEndpoint


def worker(worker_id: str, role: str | None = None) -> WorkerEndpoint:
    return WorkerEndpoint(worker_id, "decode" if role else "prefill", role, "http://w", "m")


def placement(
    *, pinned: Counter[str] | None = None, hard: bool = False, away: Collection[str] = ()
) -> Placement:
    workers = [worker("p0"), worker("p1"), worker("a0", "a"), worker("a1", "a"), worker("b0", "b")]
    return Placement(
        workers,
        pinned if pinned is not None else Counter(),
        available=lambda worker_id: worker_id not in away,
        affinity="hard" if hard else "soft",
    )


def placed(
    where: Placement, pin: str | None, *, tried: Collection[str] = ()
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


def test_of_idle_workers_the_one_that_has_had_the_least_to_do_is_next() -> None:
    """Calls that come one at a time would otherwise fill one worker's cache and leave the rest."""
    where = placement()
    went = []
    for tokens in (100, 30, 30, 50, 10):
        found = where.place_prefill(None, sessionless=True)
        assert found is not None
        went.append(found.worker.id)
        with where.prefill_load(found.worker, tokens):
            pass
    assert went == ["p0", "p1", "p1", "p1", "p0"]


def test_a_call_without_a_session_is_placed_alike_and_claims_no_affinity() -> None:
    found = placement(pinned=Counter(p0=1)).place_prefill(None, sessionless=True)
    assert found is not None
    assert (found.worker.id, found.affinity) == ("p1", "none")


def test_a_soft_pin_gives_way_to_a_worker_that_was_not_tried_and_a_hard_one_does_not() -> None:
    assert placed(placement(), "p0", tried=["p0"]) == ("p1", "rebound")
    assert placed(placement(hard=True), "p0", tried=["p0"]) == ("p0", "hit")


def test_a_soft_pin_gives_way_while_its_worker_is_away_and_a_hard_one_waits() -> None:
    assert placed(placement(away=["p0"]), "p0") == ("p1", "rebound")
    assert placed(placement(away=["p0"], hard=True), "p0") is None


def test_a_hard_pin_does_not_hold_a_call_without_a_session() -> None:
    found = placement(away=["p0"], hard=True).place_prefill("p0", sessionless=True)
    assert found is not None
    assert found.worker.id == "p1"


def test_where_all_were_tried_the_pinned_one_is_tried_again() -> None:
    assert placed(placement(), "p1", tried=["p1", "p0"]) == ("p1", "hit")


def test_nothing_is_placed_on_a_worker_that_is_away() -> None:
    assert placed(placement(away=["p0", "p1"]), None) is None
    assert placed(placement(away=["p0"], pinned=Counter(p1=9)), None) == ("p1", "new")


def test_loads_are_given_back_after_an_error() -> None:
    where = placement()
    with pytest.raises(RuntimeError), where.prefill_load(where.prefill[0], 5):
        raise RuntimeError
    assert where.prefilling.total() == 0


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40))
def test_no_worker_is_ever_two_prompts_ahead_of_another(prompts: list[int]) -> None:
    """New sessions arriving at once spread by what they bring, not by their number."""
    where = placement()
    for tokens in prompts:
        found = where.place_prefill(None, sessionless=True)
        assert found is not None
        where.prefilling[found.worker.id] += tokens
    assert abs(where.prefilling["p0"] - where.prefilling["p1"]) <= max(prompts)
