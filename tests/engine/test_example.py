"""The ReAct example runs on any cluster with its four roles, and its report adds up."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.served import Served

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report(served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`demo-report.json` of one run. The tiny models talk nonsense; the schemas keep them going."""
    path = tmp_path_factory.mktemp("example") / "report.json"
    command = [sys.executable, "-m", "examples.react", "--base-url", f"{served.url}/v1"]
    run = subprocess.run(
        [*command, "--held-out", "2", "--report", str(path)],
        cwd=ROOT,
        timeout=240,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_every_call_is_a_role_switch_within_one_prefill_worker(report: dict[str, Any]) -> None:
    assert report["sessions"] == 2
    assert report["calls"] == len(report["per_call"])
    assert report["model_switches"] == report["calls"] - report["sessions"]
    assert report["prefill_workers_per_session"] == 1


def test_the_shared_prefill_computes_less_than_one_per_role(report: dict[str, Any]) -> None:
    cached, computed = report["prefill_cached_tokens"], report["prefill_computed_tokens"]
    assert cached + computed == report["prompt_tokens"]
    assert computed < report["per_model_prefill_tokens"]


def test_what_a_session_shares_grows_with_every_call(report: dict[str, Any]) -> None:
    by_session: dict[str, list[int]] = {}
    for call in report["per_call"]:
        by_session.setdefault(call["session"], []).append(call["prefill_cached_tokens"])
    for cached in by_session.values():
        assert cached == sorted(cached)
        assert cached[-1] > cached[1] > 0


def test_decoders_process_one_prompt_token_per_call(report: dict[str, Any]) -> None:
    assert report["decode_prompt_tokens_computed"] == report["calls"]
    assert report["preemptions"] == 0
    assert report["handoff_bytes"] == sum(call["handoff_bytes"] for call in report["per_call"]) > 0


def test_held_out_items_are_asked_of_every_role(report: dict[str, Any]) -> None:
    """Of a cluster without the role that is the base, only the specialists' success is known."""
    assert report["specialists"] == {
        role: {"n": 2, "base": None, "specialist": 0.0}
        for role in ("planner", "toolcaller", "solver", "critic")
    }
