"""Served logprobs equal an in-process Hugging Face computation on the base's KV (I1, I2)."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.reference import base_cache_logprobs, chat_deviation
from tests.served import Served

pytestmark = [pytest.mark.engine, pytest.mark.exactness]

TOLERANCE = 1e-3

TASK = "A train leaves at nine and arrives at noon. How long is the journey? " * 3


def ask(
    client: openai.OpenAI, role: str, messages: list[dict[str, Any]], session: str
) -> ChatCompletion:
    """One greedy call of ``role`` that also returns token ids and logprobs."""
    return client.chat.completions.create(
        model=role,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=40,
        logprobs=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
        extra_headers={"X-Session-ID": session},
    )


def deviation(answer: ChatCompletion, models: dict[str, Path], role: str) -> float:
    """Of its 40 tokens."""
    return chat_deviation(answer, models["base"], models[role], tokens=40)


def test_first_call(
    client: openai.OpenAI, models: dict[str, Path], new_session: Callable[[], str]
) -> None:
    answer = ask(client, "planner", [{"role": "user", "content": TASK}], new_session())
    assert deviation(answer, models, "planner") < TOLERANCE


def test_role_switch_and_return_to_an_earlier_role(
    client: openai.OpenAI, models: dict[str, Path], new_session: Callable[[], str]
) -> None:
    """Caches are warm from the second call on.

    The third call is the one that fails on stock vLLM settings: planner's own first answer is now
    part of the context, and a stock decode worker would find its own KV of it in its prefix cache.
    """
    session = new_session()
    messages: list[dict[str, Any]] = [{"role": "user", "content": TASK}]
    for turn, role in enumerate(["planner", "solver", "planner", "solver"]):
        answer = ask(client, role, messages, session)
        assert deviation(answer, models, role) < TOLERANCE, f"turn {turn}, role {role}"
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": "Go on, and check the step before. " * 2})


def test_caches_and_workers_do_not_change_the_answer(
    client: openai.OpenAI, new_session: Callable[[], str]
) -> None:
    """The output depends on the context alone, not on what the caches hold or who computes (I2)."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is a KV block? " * 5}]
    first = new_session()
    answers = [
        ask(client, "solver", messages, session)
        for session in (first, first, new_session(), new_session(), new_session())
    ]
    reports = [(answer.model_extra or {})["prefillshare"] for answer in answers]
    assert {report["prefill_worker"] for report in reports} == {"prefill-0", "prefill-1"}
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_under_load(
    served: Served,
    client: openai.OpenAI,
    models: dict[str, Path],
    new_session: Callable[[], str],
) -> None:
    """Calls of both roles that share batches, prefixes and workers stay exact (I2)."""
    sessions = [new_session() for _ in range(24)]

    def call(number: int) -> tuple[str, ChatCompletion]:
        role = ("planner", "solver")[number % 2]
        content = f"{TASK} Case {number}. " + "Consider the stops. " * (number % 5)
        return role, ask(client, role, [{"role": "user", "content": content}], sessions[number])

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(call, range(24)))
    # Chance spreads them over the prefill workers, and later sessions would make up for it.
    for session in sessions:
        httpx.delete(f"{served.url}/v1/sessions/{session}", timeout=60).raise_for_status()
    assert max(deviation(answer, models, role) for role, answer in answers) < TOLERANCE


@pytest.mark.parametrize("extra", range(-2, 3))
def test_prompt_lengths_around_a_block_border(
    client: openai.OpenAI,
    models: dict[str, Path],
    new_session: Callable[[], str],
    extra: int,
) -> None:
    """The last prompt token is the decoder's own, wherever the KV block borders fall."""
    prompt = [65 + i % 26 for i in range(128 + extra)]
    answer = client.completions.create(
        model="planner",
        prompt=prompt,
        temperature=0,
        max_tokens=8,
        logprobs=1,
        extra_body={"return_token_ids": True, "ignore_eos": True},
        extra_headers={"X-Session-ID": new_session()},
    )
    [choice] = answer.choices
    assert choice.logprobs is not None
    assert choice.model_extra is not None
    served = choice.logprobs.token_logprobs
    assert served is not None
    output = choice.model_extra["token_ids"]
    reference = base_cache_logprobs(models["base"], models["planner"], prompt, output)
    assert max(abs(a - b) for a, b in zip(served, reference, strict=True)) < TOLERANCE
