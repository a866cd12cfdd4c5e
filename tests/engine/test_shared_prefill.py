"""What the prefill workers compute, and where sessions live (I3, I4, I5), on real engines."""

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.served import Served

pytestmark = [pytest.mark.engine, pytest.mark.exactness]

BLOCK = 32

TEMPLATE_HEAD = 64
"""Any two conversations share what the model's template writes in front of them, in whole blocks:
the tiny models' default system message fills no more than two."""


def call(
    client: openai.OpenAI, role: str, messages: list[dict[str, Any]], session: str, **options: Any
) -> tuple[str, dict[str, Any]]:
    """One greedy call; returns the answer's text and its ``prefillshare`` object."""
    answer = client.chat.completions.create(
        model=role,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=20,
        **{"extra_headers": {"X-Session-ID": session}, **options},
    )
    assert answer.model_extra is not None
    assert answer.usage is not None
    report = answer.model_extra["prefillshare"] | {"prompt_tokens": answer.usage.prompt_tokens}
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == report["cached_tokens"]
    return answer.choices[0].message.content or "", report


def test_a_role_switch_computes_only_tokens_after_the_last_shared_block(
    client: openai.OpenAI, new_session: Callable[[], str]
) -> None:
    session = new_session()
    context: list[dict[str, Any]] = [{"role": "user", "content": "Describe the harbour. " * 12}]
    text, first = call(client, "planner", context, session)
    assert first["affinity"] == "new"
    assert first["cached_tokens"] <= TEMPLATE_HEAD
    assert first["computed_tokens"] == first["prompt_tokens"] - first["cached_tokens"]

    _, again = call(client, "solver", context, session)
    cached = (first["prompt_tokens"] - 1) // BLOCK * BLOCK
    assert again["affinity"] == "hit"
    assert again["cached_tokens"] == cached
    assert again["computed_tokens"] == again["prompt_tokens"] - cached

    context += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And at night? " * 6},
    ]
    _, grown = call(client, "solver", context, session)
    # The first prompt ended in the generation prompt, which the assistant turn repeats: all of its
    # whole blocks are shared.
    assert grown["cached_tokens"] == first["prompt_tokens"] // BLOCK * BLOCK
    assert grown["computed_tokens"] == grown["prompt_tokens"] - grown["cached_tokens"]


def test_a_context_that_was_changed_is_named_and_recomputed_from_there(
    client: openai.OpenAI, new_session: Callable[[], str]
) -> None:
    session = new_session()
    user = {"role": "user", "content": "Describe the lighthouse. " * 12}
    text, first = call(client, "planner", [user], session)
    answered = [user, {"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
    _, grown = call(client, "planner", answered, session)
    assert (first["break"], grown["break"]) == (None, None)

    changed = [user | {"content": "Describe the lighthouse. " * 6 + "No."}, *answered[1:]]
    _, broken = call(client, "planner", changed, session)
    shared = broken["break"]["token_index"]
    assert 0 < shared < first["prompt_tokens"]
    assert broken["break"]["lost_tokens"] > 0
    assert broken["break"]["cause"] == "message_edited"
    assert broken["cached_tokens"] <= shared


def test_instructions_and_tools_of_a_role_do_not_move_the_prefix(
    client: openai.OpenAI, new_session: Callable[[], str]
) -> None:
    """Two roles with unlike heads share the whole context: their heads are rendered last."""
    session = new_session()
    user = {"role": "user", "content": "Plan a garden with three beds and a pond. " * 10}
    _, plain = call(client, "planner", [user], session)
    tool = {
        "type": "function",
        "function": {"name": "dig", "parameters": {"type": "object", "properties": {}}},
    }
    head = {"role": "system", "content": "You are the digger. Answer with a tool call."}
    _, with_head = call(client, "solver", [head, user], session, tools=[tool], tool_choice="none")
    context_tokens = plain["prompt_tokens"] - len("<|im_start|>assistant\n")
    assert with_head["cached_tokens"] >= context_tokens // BLOCK * BLOCK
    assert with_head["break"] is None


def test_decode_workers_receive_only_the_blocks_they_lack(
    client: openai.OpenAI, new_session: Callable[[], str], served: Served
) -> None:
    session = new_session()
    context: list[dict[str, Any]] = [{"role": "user", "content": "Count the boats. " * 20}]
    text, first = call(client, "planner", context, session)
    block_bytes = served.worker(first["decode_worker"]).block_bytes
    # The last prompt token is the decoder's own: its KV is not handed off.
    blocks = -(-(first["prompt_tokens"] - 1) // BLOCK)
    held = first["base_tokens_reused"] // BLOCK
    assert held * BLOCK <= TEMPLATE_HEAD
    assert first["handoff_bytes"] == (blocks - held) * block_bytes
    assert first["decode_prompt_tokens_computed"] == 1

    context += [{"role": "assistant", "content": text}, {"role": "user", "content": "More? " * 9}]
    _, second = call(client, "planner", context, session)
    reused = (first["prompt_tokens"] - 1) // BLOCK
    assert second["base_tokens_reused"] == reused * BLOCK
    blocks = -(-(second["prompt_tokens"] - 1) // BLOCK)
    assert second["handoff_bytes"] == (blocks - reused) * block_bytes
    assert second["decode_prompt_tokens_computed"] == 1


def test_a_prefill_ahead_is_what_the_next_call_finds(
    client: openai.OpenAI, new_session: Callable[[], str]
) -> None:
    """Nothing is computed twice, whichever role comes next, and the answer is the same."""
    session = new_session()
    question = {"role": "user", "content": f"{session}: describe the ferry. " * 12}
    path = f"/sessions/{session}/prefill"
    body = {"messages": [question], "wait": True}
    early: Any = client.post(path, cast_to=object, body=body)
    whole = early["prompt_tokens"] // BLOCK * BLOCK
    assert early["affinity"] == "new"
    # One engine that does everything runs one token more: it keeps what comes before the last.
    assert 0 <= early["cached_tokens"] + early["computed_tokens"] - whole <= 1

    text, report = call(client, "solver", [question], session)
    assert report["affinity"] == "hit"
    assert report["prefill_worker"] == early["prefill_worker"]
    assert report["cached_tokens"] == whole
    assert report["computed_tokens"] == report["prompt_tokens"] - whole
    totals: Any = client.get(f"/sessions/{session}", cast_to=object)
    assert (totals["calls"], totals["prefills_ahead"]) == (1, 1)
    assert totals["computed_tokens"] == early["computed_tokens"] + report["computed_tokens"]

    other, _ = call(client, "solver", [question], new_session(), extra_body={"cache_salt": session})
    assert text == other


def test_a_role_switch_computes_the_whole_prompt_where_roles_are_isolated(
    client: openai.OpenAI, new_session: Callable[[], str]
) -> None:
    """Sharing switched off, to measure it: what the paper's baseline computes (I8)."""
    alone, shared = new_session(), new_session()
    context: list[dict[str, Any]] = [{"role": "user", "content": f"{alone}: count the gulls. " * 9}]
    isolated = {"X-Session-ID": alone, "X-PrefillShare-Mode": "isolate"}
    reports = []
    for role in ("planner", "solver", "planner"):
        text, report = call(client, role, context, alone, extra_headers=isolated)
        assert text == call(client, role, context, shared)[0]
        reports.append(report)
    whole = (reports[0]["prompt_tokens"] - 1) // BLOCK * BLOCK
    assert [report["cached_tokens"] for report in reports] == [0, 0, whole]
    assert [report["base_tokens_reused"] for report in reports] == [0, 0, whole]
    assert reports[1]["computed_tokens"] == reports[1]["prompt_tokens"]
    totals: Any = client.get(f"/sessions/{alone}", cast_to=object)
    assert totals["cached_tokens"] == whole


def test_sessions_stay_on_their_prefill_worker_and_spread_over_the_pool(
    client: openai.OpenAI, new_session: Callable[[], str]
) -> None:
    # Of two, both may go to the worker that had fewer sessions before.
    homes: dict[str, set[str]] = {new_session(): set() for _ in range(3)}
    for turn in range(3):
        for session, workers in homes.items():
            for role in ("planner", "solver"):
                text = f"Session {session}, turn {turn}. " * 8
                _, report = call(client, role, [{"role": "user", "content": text}], session)
                workers.add(report["prefill_worker"])
    assert [len(workers) for workers in homes.values()] == [1, 1, 1]
    assert len(set.union(*homes.values())) == 2


def test_session_totals_tell_what_sharing_saved(
    client: openai.OpenAI, new_session: Callable[[], str], served: Served
) -> None:
    session = new_session()
    context = [{"role": "user", "content": "A long shared document. " * 20}]
    reports = [call(client, role, context, session)[1] for role in ("planner", "solver", "planner")]
    url = f"{served.url}/v1/sessions/{session}"
    totals = httpx.get(url, timeout=60).json()
    assert totals["calls"] == 3
    assert totals["prompt_tokens"] == sum(report["prompt_tokens"] for report in reports)
    assert totals["computed_tokens"] == sum(report["computed_tokens"] for report in reports)
    assert totals["handoff_bytes"] == sum(report["handoff_bytes"] for report in reports)
    # Alone, each of the two roles would have prefilled once what no earlier session had.
    new = reports[0]["computed_tokens"]
    assert totals["per_model_prefill_tokens"] >= 2 * new > totals["computed_tokens"]

    assert httpx.delete(url, timeout=60).status_code in (200, 204)
    assert httpx.get(url, timeout=60).status_code == 404
