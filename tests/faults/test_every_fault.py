"""Each fault at each place of one call, by itself: the call goes on, or says clearly why not."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.bench import Shape
from tests.faults.play import Report, play
from tests.faults.scenario import QUESTIONS, TOOLS, CallPlan, Scenario, SessionPlan
from tests.faults.virtual_time import run
from tests.mocks.mock_pair_faults import (
    DECODE_FAULTS,
    PREFILL_FAULTS,
    Fault,
)

pytestmark = pytest.mark.faults

SHAPE = Shape(prefill=2, decode=("alpha-0", "alpha-1"))
PLACES = (-1, 0, 1, 5, 9)
FORMS: dict[str, dict[str, Any]] = {
    "stream": {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True},
    "tools": {"stream": True, "tools": TOOLS},
    "whole": {"stream": False, "n": 2, "logprobs": True},
}


def played(base_dir: Path, form: str, **faults: Fault) -> Report:
    """One call on a cluster with two workers of each kind, and faults by worker."""
    body = {"model": "alpha", "return_token_ids": True, **FORMS[form]}
    call = CallPlan(1, "alpha", "chat", body, QUESTIONS[1])
    planned: dict[str, list[Fault]] = {
        "prefill-0": [],
        "prefill-1": [],
        "alpha-0": [],
        "alpha-1": [],
    }
    for worker in planned:
        if (fault := faults.get(worker.replace("-", ""))) is not None:
            planned[worker].append(fault)
    scenario = Scenario(len(form), SHAPE, [SessionPlan("s", [call])], planned, [])
    return run(play(scenario, base_dir))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", DECODE_FAULTS)
def test_a_decode_worker_that_fails_anywhere_is_replaced_without_a_seam(
    base_dir: Path, kind: Any, form: str
) -> None:
    """`alpha-1` is well, so every call has to be answered, whatever happens to `alpha-0`."""
    for place in PLACES:
        report = played(base_dir, form, alpha0=Fault(kind, after=place))
        assert not report.failed, report
        assert report.answered == report.calls, report


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", DECODE_FAULTS)
def test_a_second_worker_that_fails_as_well_changes_nothing(
    base_dir: Path, kind: Any, form: str
) -> None:
    """The answer moves, and moves again after some more tokens."""
    for place in (1, 5):
        first, second = Fault(kind, after=place), Fault("preempted", after=place + 3)
        report = played(base_dir, form, alpha0=first, alpha1=second)
        assert not report.failed, report


@pytest.mark.parametrize("kind", PREFILL_FAULTS)
def test_a_prefill_worker_that_fails_is_asked_again_or_leaves_a_clear_error(
    base_dir: Path, kind: Any
) -> None:
    """At a call's first prefill, and at the one that resumes its answer."""
    for at in (0, 1):
        for form in FORMS:
            resumes = Fault("preempted", after=4)
            report = played(base_dir, form, prefill0=Fault(kind, at), alpha0=resumes)
            assert not report.failed, report
            if not kind.startswith("hang"):
                assert report.answered == report.calls, report
