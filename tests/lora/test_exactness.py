"""Whatever happens to a call, its answer is the one of its adapter on the base's KV."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.engine_faults.at_rest import assert_at_rest
from tests.lora.test_pool import BLOCK, ROLES, TASK, TOLERANCE, deviation, report
from tests.reference import base_cache_gaps, base_cache_logprobs
from tests.served import Served

pytestmark = [pytest.mark.engine, pytest.mark.exactness]

GREEDY = 1e-3
"""How far below the best a token may be that is called greedy."""

TRIES = 5
"""On a busy machine a whole answer may be on its way before its worker is killed, and calls that
are sent at once may come one after the other."""


@pytest.mark.parametrize("extra", range(-2, 3))
def test_prompt_lengths_around_a_block_border(
    client: openai.OpenAI,
    decoders: dict[str, Path],
    new_session: Callable[[], str],
    extra: int,
) -> None:
    """The adapter is on from the last prompt token, wherever the borders of blocks and chunks are.

    128 tokens are four blocks, and a chunk of the colocated engine's prefill.
    """
    prompt = [65 + i % 26 for i in range(4 * BLOCK + extra)]
    for role in ROLES:
        answer = client.completions.create(
            model=role,
            prompt=prompt,
            temperature=0,
            max_tokens=8,
            logprobs=1,
            extra_body={"return_token_ids": True, "ignore_eos": True},
            extra_headers={"X-Session-ID": new_session()},
        )
        [choice] = answer.choices
        assert choice.logprobs is not None
        output = (choice.model_extra or {})["token_ids"]
        reference = base_cache_logprobs(decoders["base"], decoders[role], prompt, output)
        served = choice.logprobs.token_logprobs or []
        assert max(abs(a - (b or 0)) for a, b in zip(reference, served, strict=True)) < TOLERANCE


def test_a_context_that_grows_over_all_roles(
    client: openai.OpenAI,
    served_roles: list[str],
    decoders: dict[str, Path],
    new_session: Callable[[], str],
) -> None:
    """Adapters, the base and, where there are any, weights with workers of their own.

    Every answer becomes context, which the base computes anew: no adapter's KV is ever read.
    """
    session = new_session()
    messages: list[dict[str, Any]] = [{"role": "user", "content": TASK}]
    for turn in range(9):
        role = served_roles[turn % len(served_roles)]
        answer = client.chat.completions.create(
            model=role,
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=24,
            logprobs=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
            extra_headers={"X-Session-ID": session},
        )
        assert deviation(answer, decoders, role) < TOLERANCE, f"turn {turn}, {role}"
        assert report(answer)["break"] is None
        said = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]


def test_several_choices_are_each_exact_and_share_the_prompt(
    client: openai.OpenAI, decoders: dict[str, Path], new_session: Callable[[], str]
) -> None:
    session = new_session()
    prompt = f"{session}: {TASK}"
    answer = client.chat.completions.create(
        model="solver",
        messages=[{"role": "user", "content": prompt}],
        n=3,
        seed=5,
        temperature=1.0,
        max_tokens=16,
        logprobs=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
        extra_headers={"X-Session-ID": session},
    )
    ids = (answer.model_extra or {})["prompt_token_ids"]
    assert len({choice.message.content for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert choice.logprobs is not None
        output = (choice.model_extra or {})["token_ids"]
        reference = base_cache_logprobs(decoders["base"], decoders["solver"], ids, output)
        served = [token.logprob for token in choice.logprobs.content or ()]
        assert max(abs(a - b) for a, b in zip(reference, served, strict=True)) < TOLERANCE
    # Further choices compute no more than the block in which the prompt ends.
    assert report(answer)["computed_tokens"] <= len(ids) + 2 * BLOCK


def test_an_answer_outlives_its_worker(
    served: Served,
    client: openai.OpenAI,
    decoders: dict[str, Path],
    new_session: Callable[[], str],
) -> None:
    """Killed in the middle, it goes on with the same adapter, from its own tokens."""
    for _ in range(TRIES):
        prompt, output, told = answer_and_kill(served, client, new_session())
        assert len(output) == 2000
        if told["resumed"]:
            break
    gaps = base_cache_gaps(decoders["base"], decoders["planner"], prompt, output)
    assert max(gaps) < GREEDY
    assert told["resumed"] == 1


def answer_and_kill(
    served: Served, client: openai.OpenAI, session: str
) -> tuple[list[int], list[int], dict[str, Any]]:
    """Ids of the prompt and the answer, and its report. Its worker was killed, and is back."""
    stream = client.chat.completions.create(
        model="planner",
        messages=[{"role": "user", "content": TASK}],
        temperature=0,
        max_tokens=2000,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
        extra_headers={"X-Session-ID": session},
    )
    prompt: list[int] = []
    output: list[int] = []
    back: Callable[[], None] | None = None
    told: dict[str, Any] = {}
    for chunk in stream:
        extra = chunk.model_extra or {}
        prompt = extra.get("prompt_token_ids") or prompt
        told = extra.get("prefillshare") or told
        if chunk.choices:
            output += (chunk.choices[0].model_extra or {}).get("token_ids") or []
        if back is None and len(output) > 20:
            back = served.kill(stream.response.headers["X-PrefillShare-Decode-Worker"])
    assert back is not None
    back()
    return prompt, output, told


def test_nothing_is_left_of_calls_that_ended_and_of_those_given_up(
    served: Served, client: openai.OpenAI, new_session: Callable[[], str]
) -> None:
    """No call, reservation, lease, request or block; a cached block is free to be taken."""

    def give_up(number: int) -> None:
        stream = client.chat.completions.create(
            model=ROLES[number % 3],
            messages=[{"role": "user", "content": f"{number}: {TASK}"}],
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Session-ID": new_session()},
        )
        with stream:
            for _ in zip(range(number), stream, strict=False):
                pass

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(give_up, range(6)))
    assert_at_rest(served)


def test_preemption_in_one_engine_changes_no_answer(
    served: Served, colocated: bool, decoders: dict[str, Path]
) -> None:
    """More answers at once than there are KV blocks for, past the router, which would not do it."""
    if not colocated:
        pytest.skip("a decode worker gives such calls back: tests/worker/test_preemption.py")
    [engine] = served.workers
    with httpx.Client(timeout=240) as http:
        cards = http.get(f"{served.url}/v1/roles").json()["data"]
        names = {card["id"]: card["decoder"] for card in cards}

        def call(request_id: str, number: int) -> tuple[str, list[int], list[int]]:
            role = ROLES[number % 3]
            prompt = [(number + i) % 251 for i in range(900)]
            answer = http.post(
                f"{engine.url}/v1/completions",
                json={
                    "model": names[role],
                    "prompt": prompt,
                    "max_tokens": 200,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                },
                headers={"X-Request-Id": request_id},
            )
            assert answer.status_code == 200, answer.text
            account = http.get(f"{engine.url}/prefillshare/calls/{request_id}").json()
            assert account["prompt_tokens_computed"] == 1
            return role, prompt, answer.json()["choices"][0]["token_ids"]

        before = _preemptions(http, engine.url)
        answers: list[tuple[str, list[int], list[int]]] = []
        for trial in range(TRIES):
            ids = [f"preempted-{trial}-{number}" for number in range(18)]
            with ThreadPoolExecutor(18) as pool:
                answers += pool.map(call, ids, range(18))
            if _preemptions(http, engine.url) > before:
                break
        assert _preemptions(http, engine.url) > before
    for role, prompt, output in answers:
        assert max(base_cache_gaps(decoders["base"], decoders[role], prompt, output)) < GREEDY


def _preemptions(http: httpx.Client, url: str) -> float:
    text = http.get(f"{url}/metrics").text
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("vllm:num_preemptions_total")
    )
