"""Call records from what a server reports."""

from typing import Any

import pytest

from prefillshare_agents import CallRecord


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
