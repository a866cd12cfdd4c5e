"""Rendered texts and reports."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from prefillshare_prefix import CallRow, Cause, Finding, Report, find_break, text_break
from tests.prefix.talk import request, said, user

REPORT = Report(
    calls=2,
    prompt_tokens=1500,
    shared_tokens=400,
    findings=(
        Finding(
            call=1,
            previous_call=0,
            role="critic",
            broken=find_break(
                request(user("It is 10:41."), said("Yes.")),
                request(user("It is 10:42."), said("Yes."), user("Go on [bold].")),
            ),  # type: ignore[arg-type]
            token_index=400,
            lost_tokens=500,
            prompt_tokens=900,
        ),
    ),
    rows=(CallRow(0, "planner", 600, 0), CallRow(1, "critic", 900, 400, 500)),
    session="order-[/4711]",
)


def shown(report: Report) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report)
    return console.export_text()


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        ("<s>user: a<think>hm</think>yes", "<s>user: ayes<end>more", Cause.THINK_STRIPPED),
        ("Today is 3 March 2025.\nuser: a", "Today is 4 March 2025.\nuser: a, b", Cause.TIMESTAMP),
        ("user: a  \nassistant:", "user: a\nassistant: b", Cause.WHITESPACE),
        ('{"a":1}', '{"b":1} and', Cause.TEMPLATE),
    ],
)
def test_a_rendered_text_that_was_rewritten_has_its_cause(
    before: str, after: str, cause: Cause
) -> None:
    broken = text_break(before, after)

    assert (broken.cause, broken.message_index) == (cause, None)


@pytest.mark.parametrize(("calls", "text"), [(1, "1 call, "), (2, "2 calls, ")])
def test_a_report_counts_calls_in_the_right_number(calls: int, text: str) -> None:
    assert text in shown(Report(calls=calls, prompt_tokens=10, shared_tokens=0, findings=()))


def test_a_report_shows_calls_places_and_remedies() -> None:
    text = shown(REPORT)

    assert "order-[/4711]" in text
    assert "400 (44%)" in text
    assert "parts from call 0 at token 400; 500 tokens lost" in text
    assert "It is 10:4⟦1⟧." in text
    assert "It is 10:4⟦2⟧." in text
    assert "1,500 prompt tokens, 26.7% shared; 1 break, 500 tokens lost" in text
    assert "with the fixes: 60.0%" in text


def test_estimates_are_marked() -> None:
    estimate = Report(calls=1, prompt_tokens=10, shared_tokens=5, estimated=True)

    assert "≈10 prompt tokens, ≈50.0% shared" in shown(estimate)


def test_a_running_session_is_reported_from_its_list_of_calls() -> None:
    call = {"index": 0, "role": "planner", "prompt_tokens": 100, "cached_tokens": 64}
    broken = {"token_index": 30, "lost_tokens": 60, **REPORT.findings[0].broken.to_dict()}
    later = {**call, "index": 1, "role": "critic", "shared_tokens": 30, "break": broken}

    report = Report.of_calls([{**call, "shared_tokens": 0, "break": None}, later])

    assert (report.calls, report.prompt_tokens, report.shared_tokens) == (2, 200, 30)
    assert report.rows[1] == CallRow(1, "critic", 100, 30, 60)
    assert report.findings[0].broken == REPORT.findings[0].broken
    assert report.findings[0].token_index == 30


def test_a_break_of_an_older_or_newer_server_is_unknown() -> None:
    for told in ({"token_index": 3, "lost_tokens": 6}, {"cause": "of_tomorrow"}):
        report = Report.of_calls([{"role": "critic", "break": told}])
        assert report.findings[0].broken.cause is Cause.UNKNOWN


def test_a_report_is_json() -> None:
    said_again = json.loads(json.dumps(REPORT.to_dict()))

    assert said_again["shared_ratio"] == 0.2667
    assert said_again["findings"][0]["break"]["cause"] == "timestamp"
    assert said_again["rows"][1]["lost_tokens"] == 500


def test_the_package_needs_the_standard_library_only() -> None:
    program = "import sys, prefillshare_prefix; print({m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    loaded = set(eval(done.stdout)) - {"prefillshare_prefix"}
    assert not loaded & {"rich", "pydantic", "openai", "typer", "prefillshare_agents"}
