"""1,000 random scenarios with faults: none wrong, none hung, nothing leaked.

One seed alone: `PREFILLSHARE_FAULT_SEED=17 pytest tests/faults/test_scenarios.py`.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.play import Report, play
from tests.faults.scenario import scenario
from tests.faults.virtual_time import Stuck, run

SCENARIOS = 1000
TOGETHER = 50
SHOWN = 3
"""Failed scenarios of a test whose logs are printed."""

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "faults.json"

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def reports() -> Iterator[list[Report]]:
    """Reports of all scenarios that this run has played so far."""
    found: list[Report] = []
    yield found
    if os.environ.get("PREFILLSHARE_WRITE_RESULTS") == "1" and len(found) == SCENARIOS:
        counts = {
            "scenarios": len(found),
            "wrong": sum(bool(report.wrong) for report in found),
            "hung": sum(bool(report.hung) for report in found),
            "leaked": sum(bool(report.leaked) for report in found),
        }
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(counts, indent=2) + "\n")


def _seeds() -> list[range]:
    if (only := os.environ.get("PREFILLSHARE_FAULT_SEED")) is not None:
        return [range(int(only), int(only) + 1)]
    return [range(start, start + TOGETHER) for start in range(0, SCENARIOS, TOGETHER)]


def _played(seed: int, base_dir: Path) -> Report:
    try:
        return run(play(scenario(seed), base_dir))
    except Stuck as error:
        return Report(scenario(seed), hung=[str(error)])
    except AssertionError as error:
        return Report(scenario(seed), leaked=[str(error)])


@pytest.mark.parametrize("seeds", _seeds(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_whatever_fails_answers_are_right_or_clear_errors_and_nothing_is_left(
    seeds: range, reports: list[Report], base_dir: Path
) -> None:
    failed = []
    for seed in seeds:
        report = _played(seed, base_dir)
        reports.append(report)
        if report.failed:
            failed.append(report)
        report.log = report.log if report.failed and len(failed) <= SHOWN else []
    for report in failed[:SHOWN]:
        print(report)
    assert not failed, f"seeds {[each.scenario.seed for each in failed if each.scenario]}"
