"""Call records from what a server reports."""

import io
from typing import Any

import pytest
from rich.console import Console

from prefillshare_agents import CallRecord, SessionUsage


@pytest.mark.parametrize(
    ("usage", "extra", "expected"),
    [
        (None, {"cached_tokens": 30, "computed_tokens": 12}, (42, 30, 12)),
        ({"prompt_tokens": None}, {"cached_tokens": 30, "computed_tokens": 12}, (42, 30, 12)),
        ({"prompt_tokens": 40}, {"cached_tokens": 30}, (40, 30, 10)),
        ({"prompt_tokens": 40}, None, (40, 0, 40)),
        (None, None, (0, 0, 0)),
    ],
)
def test_prompt_tokens_are_known_without_a_usage_object(
    usage: Any, extra: Any, expected: tuple[int, int, int]
) -> None:
    call = CallRecord.of("solver", usage=usage, extra=extra, finish_reason="stop", wall_s=1.0)

    assert (call.prompt_tokens, call.cached_tokens, call.computed_tokens) == expected


def test_the_usage_table_cuts_no_role_name_in_a_narrow_terminal() -> None:
    roles = ("researcher", "research_critic")
    usage = {"prompt_tokens": 12_345, "completion_tokens": 12}
    calls = [
        CallRecord.of(role, usage=usage, extra=None, finish_reason="stop", wall_s=1)
        for role in roles
    ]
    output = io.StringIO()
    Console(width=80, file=output).print(SessionUsage.of(calls))
    names = [line.split("│")[1].strip() for line in output.getvalue().splitlines() if "│" in line]

    assert "".join(names) == "".join(roles) + "all"
