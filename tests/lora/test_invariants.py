"""What holds of any cluster, where adapters share workers and in one engine."""

from collections.abc import Callable

import httpx
import openai
import pytest

from tests.engine import test_shared_prefill as shared_prefill
from tests.lora.test_pool import TASK, ask, report
from tests.served import Served

pytestmark = [pytest.mark.engine, pytest.mark.exactness]


@pytest.mark.parametrize(
    "test",
    [
        shared_prefill.test_a_role_switch_computes_only_tokens_after_the_last_shared_block,
        shared_prefill.test_a_context_that_was_changed_is_named_and_recomputed_from_there,
        shared_prefill.test_instructions_and_tools_of_a_role_do_not_move_the_prefix,
        shared_prefill.test_a_prefill_ahead_is_what_the_next_call_finds,
        shared_prefill.test_a_role_switch_computes_the_whole_prompt_where_roles_are_isolated,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_prefill_is_shared_as_with_workers_for_each_role(
    test: Callable[[openai.OpenAI, Callable[[], str]], None],
    client: openai.OpenAI,
    new_session: Callable[[], str],
) -> None:
    test(client, new_session)


def test_a_session_adds_up_what_its_calls_report(
    served: Served, client: openai.OpenAI, new_session: Callable[[], str]
) -> None:
    session = new_session()
    answers = [ask(client, role, f"{session}: {TASK}", session) for role in ("planner", "solver")]
    told = httpx.get(f"{served.url}/v1/sessions/{session}", timeout=60).json()
    for field in ("cached_tokens", "computed_tokens", "handoff_bytes"):
        assert told[field] == sum(report(answer)[field] for answer in answers), field
    prompts = [answer.usage.prompt_tokens for answer in answers if answer.usage is not None]
    assert (told["calls"], told["prompt_tokens"]) == (2, sum(prompts))
    assert told["cached_tokens"] + told["computed_tokens"] == sum(prompts)
    assert told["roles"] == ["planner", "solver"]


def test_a_worker_that_adapters_share_computes_no_prompt(served: Served, colocated: bool) -> None:
    """Nor with the base's weights, which it has: who calls it directly learns what is missing."""
    if colocated:
        pytest.skip("the one engine is there to compute it")
    cards = httpx.get(f"{served.url}/v1/roles", timeout=60).json()["data"]
    names = {card["id"]: card["decoder"] for card in cards}
    for role in ("planner", "critic"):
        body = {"model": names[role], "prompt": [1] * 40, "max_tokens": 2}
        answer = httpx.post(f"{served.worker('lora-0').url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "base_kv_missing"
