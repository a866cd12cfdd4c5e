"""The demo's figures on real engines: they add up, and the specialists do their jobs."""

from typing import Any

import pytest

from examples.react.report import report
from examples.react.roles import ROLES
from examples.specialists.live import Success, measure
from tests.examples.conftest import Run
from tests.served import Served

pytestmark = pytest.mark.engine


@pytest.fixture
def figures(runs: dict[str, Run]) -> dict[str, Any]:
    """`demo-report.json` of the recorded run."""
    return report(runs["react"].sessions, wall_s=1, preemptions=0)


def test_every_call_is_a_role_switch_within_one_prefill_worker(figures: dict[str, Any]) -> None:
    assert figures["sessions"] == 2
    assert figures["calls"] == len(figures["per_call"])
    assert figures["model_switches"] == figures["calls"] - figures["sessions"]
    assert figures["prefill_workers_per_session"] == 1


def test_the_shared_prefill_computes_less_than_one_per_role(figures: dict[str, Any]) -> None:
    cached, computed = figures["prefill_cached_tokens"], figures["prefill_computed_tokens"]
    assert cached + computed == figures["prompt_tokens"]
    assert computed < figures["per_model_prefill_tokens"]


def test_decoders_process_one_prompt_token_per_call(figures: dict[str, Any]) -> None:
    assert figures["decode_prompt_tokens_computed"] == figures["calls"]
    assert figures["handoff_bytes"] == sum(each["handoff_bytes"] for each in figures["per_call"])
    assert figures["handoff_bytes"] > 0
    assert all(each["ttft_s"] > 0 for each in figures["per_call"])


def test_the_specialists_do_what_the_base_cannot(served: Served) -> None:
    """On the same prompts and the same KV; one made-up item of each job."""
    assert measure(f"{served.url}/v1", 1) == dict.fromkeys(ROLES, Success(1, 0, 1))
