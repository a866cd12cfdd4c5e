"""Adapters that share workers answer exactly, over one copy of the base's blocks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.reference import chat_deviation

pytestmark = [pytest.mark.engine, pytest.mark.exactness]

TOLERANCE = 1e-4
BLOCK = 32
"""Tokens."""

TASK = "A train leaves at nine and arrives at noon. How long is the journey? " * 3
ROLES = ("planner", "solver", "critic")


def ask(client: openai.OpenAI, role: str, content: str, session: str) -> ChatCompletion:
    """One greedy call that also returns token ids and logprobs."""
    return client.chat.completions.create(
        model=role,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=24,
        logprobs=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
        extra_headers={"X-Session-ID": session},
    )


def report(answer: ChatCompletion | Completion) -> dict[str, Any]:
    found: dict[str, Any] = (answer.model_extra or {})["prefillshare"]
    return found


def deviation(answer: ChatCompletion, decoders: dict[str, Path], role: str) -> float:
    """Of its 24 tokens."""
    return chat_deviation(answer, decoders["base"], decoders[role], tokens=24)


def test_each_role_answers_with_its_own_decoder_on_base_kv(
    client: openai.OpenAI,
    served_roles: list[str],
    decoders: dict[str, Path],
    new_session: Callable[[], str],
) -> None:
    session = new_session()
    answers = {role: ask(client, role, TASK, session) for role in served_roles}
    assert {role: deviation(answers[role], decoders, role) < TOLERANCE for role in answers} == (
        dict.fromkeys(answers, True)
    )
    said = [answer.choices[0].message.content for answer in answers.values()]
    assert len(set(said)) == len(said)
    assert [answer.model for answer in answers.values()] == list(answers)


def test_a_mixed_batch_is_exact(
    client: openai.OpenAI, decoders: dict[str, Path], new_session: Callable[[], str]
) -> None:
    """Tokens with no adapter, and with either of two, in the same forward passes."""

    def call(number: int) -> tuple[str, ChatCompletion]:
        role = ROLES[number % 3]
        content = f"{TASK} Case {number}. " + "Consider the stops. " * (number % 5)
        return role, ask(client, role, content, new_session())

    with ThreadPoolExecutor(18) as pool:
        answers = list(pool.map(call, range(18)))
    assert max(deviation(answer, decoders, role) for role, answer in answers) < TOLERANCE


def test_a_role_switch_pulls_no_block_that_another_role_has_pulled(
    client: openai.OpenAI, colocated: bool, new_session: Callable[[], str]
) -> None:
    session = new_session()
    answers = [ask(client, role, f"{session}: {TASK}", session) for role in ROLES]
    assert len({report(answer)["decode_worker"] for answer in answers}) == 1
    for answer in answers[1:]:
        assert answer.usage is not None
        prompt_tokens = answer.usage.prompt_tokens
        whole_blocks = (prompt_tokens - 1) // BLOCK * BLOCK
        assert report(answer)["base_tokens_reused"] == whole_blocks
        pulled = 0 if colocated else prompt_tokens - 1 - whole_blocks
        assert report(answer)["base_tokens_received"] == pulled
        assert report(answer)["decode_prompt_tokens_computed"] == 1
