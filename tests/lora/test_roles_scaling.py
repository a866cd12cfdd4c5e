"""More roles over one context take no more prefill and no more KV, but for what is their own."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.engine_faults.at_rest import assert_at_rest, state, until
from tests.lora.test_pool import BLOCK, report
from tests.served import Served

pytestmark = [pytest.mark.engine, pytest.mark.exactness]

CONTEXT = [65 + (i * i) % 26 for i in range(20 * BLOCK)]
TAIL = 8
"""Tokens that only one role's prompts end with."""

TRIES = 5
"""On a busy machine a role may have said everything before the last one begins."""


@pytest.fixture
def eight(served: Served, decoders: dict[str, Path]) -> Iterator[list[str]]:
    """Roles; as many adapters as there are slots speak for them."""
    names = [f"role{number}" for number in range(8)]
    with httpx.Client(base_url=f"{served.url}/v1", timeout=240) as http:
        for number, name in enumerate(names):
            adapter = decoders["planner" if number % 2 else "solver"]
            http.put(f"roles/{name}", json={"adapter": str(adapter)}).raise_for_status()
        yield names
        for name in names:
            http.delete(f"roles/{name}").raise_for_status()


def prompt_of(number: int, context: list[int]) -> list[int]:
    return [*context, *[33 + number] * TAIL]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_each_further_role_computes_less_than_a_block(
    client: openai.OpenAI, eight: list[str], new_session: Callable[[], str], count: int
) -> None:
    session = new_session()
    context = [97 + count, *CONTEXT[1:]]
    computed = []
    for number, role in enumerate(eight[:count]):
        answer = client.completions.create(
            model=role,
            prompt=prompt_of(number, context),
            max_tokens=2,
            temperature=0,
            extra_headers={"X-Session-ID": session},
        )
        computed.append(report(answer)["computed_tokens"])
    assert computed == [len(context) + TAIL, *[TAIL] * (count - 1)]


@pytest.mark.parametrize("count", [1, 8])
def test_each_further_role_holds_the_blocks_of_its_own_tokens_only(
    served: Served,
    client: openai.OpenAI,
    eight: list[str],
    new_session: Callable[[], str],
    count: int,
) -> None:
    for _ in range(TRIES):
        assert_at_rest(served)
        before = generated(served)
        with answering(client, eight[:count], new_session()):
            until(lambda: not any(state(served, w.id)["open_leases"] for w in served.workers))
            live = [state(served, worker.id) for worker in served.workers]
            # As the workers count them: their clients may be far behind.
            own = count * TAIL + generated(served) - before
        if sum(each["running"] for each in live) == count:
            break
    assert_at_rest(served)
    assert sum(each["running"] for each in live) == count
    in_use = sum(each["num_blocks"] - 1 - each["free_blocks"] for each in live)
    shared = len(CONTEXT) // BLOCK
    # Each has a block that is not full, and may have one that is not begun.
    assert shared < in_use <= shared + own // BLOCK + 2 * count


def generated(served: Served) -> int:
    """Tokens of all answers so far."""
    urls = [worker.url for worker in served.workers if worker.phase != "prefill"]
    texts = [httpx.get(f"{url}/metrics", timeout=60).text for url in urls]
    counts = re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", "".join(texts), re.MULTILINE)
    assert len(counts) >= len(urls)
    return int(sum(map(float, counts)))


@contextmanager
def answering(client: openai.OpenAI, roles: list[str], session: str) -> Iterator[None]:
    """Inside the block each role answers, or has."""
    counts = [0] * len(roles)
    done = threading.Event()

    def answer(number: int) -> None:
        stream = client.completions.create(
            model=roles[number],
            prompt=prompt_of(number, CONTEXT),
            max_tokens=1300,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            extra_headers={"X-Session-ID": session},
        )
        with stream:
            for chunk in stream:
                for choice in chunk.choices:
                    counts[number] += len((choice.model_extra or {}).get("token_ids") or ())
                if done.is_set():
                    return

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(len(roles))]
    # The first one fills the cache for the others.
    for number, thread in enumerate(threads):
        thread.start()
        while not counts[number]:
            assert thread.is_alive() or counts[number]
            done.wait(0.01)
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
