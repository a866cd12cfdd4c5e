"""What a prefill counts for while it runs: the tokens that its worker has to compute."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

from tests.mocks.mock_workers import BLOCK
from tests.router.conftest import Bench, Start, until

SESSION = {"X-Session-ID": "s"}
ISOLATED = {**SESSION, "X-PrefillShare-Mode": "isolate"}
LONG = [7 + i % 50 for i in range(10 * BLOCK)]
MORE = [11] * (BLOCK + 5)


async def send(bench: Bench, prompt: Any, headers: dict[str, str], **fields: Any) -> Any:
    body = {"model": "alpha", "prompt": prompt, **fields}
    status, answer, _ = await bench.post("/v1/completions", body, headers)
    assert status == 200, answer
    return answer["prefillshare"]


@asynccontextmanager
async def held(bench: Bench, call: Awaitable[Any], prefills: int = 1) -> AsyncIterator[int]:
    """Hold the prefills of a call; the value is what they count for."""
    before = sum(len(worker.requests) for worker in bench.prefill)
    for worker in bench.prefill:
        worker.fault = "slow"
        worker.gate.clear()
    running = asyncio.ensure_future(call)
    await until(lambda: sum(len(w.requests) for w in bench.prefill) == before + prefills)
    yield bench.router.placement.prefilling.total()
    for worker in bench.prefill:
        worker.fault = None
        worker.gate.set()
    await running


async def test_what_the_session_sent_before_does_not_count(bench: Bench) -> None:
    async with held(bench, send(bench, LONG, SESSION)) as first:
        assert first == len(LONG)
    async with held(bench, send(bench, LONG + MORE, SESSION)) as second:
        assert second == len(MORE)
    async with held(bench, send(bench, LONG + MORE, SESSION)) as again:
        assert again == len(MORE) % BLOCK


async def test_of_a_prompt_that_fills_its_blocks_the_last_one_counts(bench: Bench) -> None:
    await send(bench, LONG, SESSION)
    async with held(bench, send(bench, LONG, SESSION)) as again:
        assert again == BLOCK


async def test_an_isolated_role_knows_its_own_prompts_only(bench: Bench) -> None:
    await send(bench, LONG, SESSION)
    async with held(bench, send(bench, LONG, ISOLATED)) as first:
        assert first == len(LONG)
    async with held(bench, send(bench, LONG + MORE, ISOLATED)) as own:
        assert own == len(MORE)
    async with held(bench, send(bench, LONG + MORE, ISOLATED, model="beta")) as others:
        assert others == len(LONG + MORE)


async def test_what_was_sent_with_another_salt_counts(bench: Bench) -> None:
    await send(bench, LONG, SESSION, cache_salt="one")
    async with held(bench, send(bench, LONG, SESSION, cache_salt="other")) as other:
        assert other == len(LONG)


async def test_what_another_worker_computed_counts(start: Start) -> None:
    async with start(prefill=2) as bench:
        report = await send(bench, LONG, SESSION)
        bench.router.health.drain(report["prefill_worker"])
        async with held(bench, send(bench, LONG, SESSION)) as moved:
            assert moved == len(LONG)
        async with held(bench, send(bench, LONG + MORE, SESSION)) as after:
            assert after == len(MORE)


async def test_an_answer_counts_for_the_base_never_read_it(bench: Bench) -> None:
    question = [{"role": "user", "content": "another question about numbers " * 8}]
    body = {"model": "alpha", "messages": question}
    _, first, _ = await bench.post("/v1/chat/completions", body, SESSION)
    said = first["choices"][0]["message"]
    follow = {"role": "user", "content": "more"}
    body = {"model": "alpha", "messages": [*question, said, follow]}
    async with held(bench, bench.post("/v1/chat/completions", body, SESSION)) as second:
        [asked, again] = [request["prompt"] for request in bench.prefill[0].requests]
        assert again[: len(asked)] == asked
        known = (await bench.get("/v1/sessions/s/calls"))[1]["data"][0]["context_tokens"]
        assert second == len(again) - known // BLOCK * BLOCK


async def test_a_further_choice_counts_with_its_last_block(bench: Bench) -> None:
    prompt = LONG + MORE
    async with held(bench, send(bench, prompt, SESSION, n=3)) as first:
        assert first == len(prompt)
        bench.prefill[0].fault = "slow"
        gate = bench.prefill[0].gate
        gate.set()
        gate.clear()
        await until(lambda: len(bench.prefill[0].requests) == 3)
        assert bench.router.placement.prefilling.total() == 2 * (len(MORE) % BLOCK)


async def test_a_prefill_ahead_is_known_to_the_call_after_it(bench: Bench) -> None:
    messages = [{"role": "user", "content": "another question about numbers " * 8}]
    await bench.post("/v1/sessions/s/prefill", {"messages": messages, "wait": True})
    body = {"model": "alpha", "messages": messages}
    async with held(bench, bench.post("/v1/chat/completions", body, SESSION)) as call:
        [ahead, prompt] = [request["prompt"] for request in bench.prefill[0].requests]
        assert call == len(prompt) - len(ahead)


async def test_new_sessions_go_where_the_fewest_uncached_tokens_are_in_flight(
    start: Start,
) -> None:
    async with start(prefill=2) as bench:
        home = (await send(bench, LONG, SESSION))["prefill_worker"]
        away = (await send(bench, MORE, {"X-Session-ID": "t"}))["prefill_worker"]
        assert away != home
        for worker in bench.prefill:
            worker.fault = "slow"
        # A long prompt, of which little is new, against a shorter one that is all new.
        long = asyncio.create_task(send(bench, LONG + MORE, SESSION))
        short = asyncio.create_task(send(bench, LONG[5:], {"X-Session-ID": "t"}))
        await until(lambda: all(len(worker.requests) == 2 for worker in bench.prefill))
        third = asyncio.create_task(send(bench, MORE, {"X-Session-ID": "u"}))
        await until(lambda: sum(len(worker.requests) for worker in bench.prefill) == 5)
        for worker in bench.prefill:
            worker.gate.set()
        assert (await third)["prefill_worker"] == home
        await asyncio.gather(long, short)
