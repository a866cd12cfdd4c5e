"""Prefill ahead of a call: in the background, once, in order, and never in a call's way."""

import asyncio
from typing import Any

import pytest

from prefillshare_server.router import ahead as ahead_module
from tests.mocks.mock_workers import BLOCK
from tests.router.conftest import Bench, Start, until

SESSION = {"X-Session-ID": "s"}
PATH = "/v1/sessions/s/prefill"
DOCUMENT = {"role": "user", "content": "another question about numbers and then some words " * 12}


def context(*more: str) -> list[dict[str, str]]:
    return [DOCUMENT, *({"role": "user", "content": text} for text in more)]


async def ahead(
    bench: Bench, *more: str, headers: dict[str, str] | None = None, **fields: Any
) -> tuple[int, Any, Any]:
    return await bench.post(PATH, {"messages": context(*more), **fields}, headers)


async def call(bench: Bench, *more: str, role: str = "alpha", **fields: Any) -> tuple[int, Any]:
    body = {"model": role, "messages": context(*more), **fields}
    status, answer, _ = await bench.post("/v1/chat/completions", body, SESSION)
    return status, answer


async def test_it_is_accepted_at_once_and_runs_in_the_background(bench: Bench) -> None:
    bench.prefill[0].fault = "slow"
    status, answer, _ = await ahead(bench)
    assert status == 202
    tokens = answer.pop("prompt_tokens")
    assert answer == {
        "id": "s",
        "object": "prefillshare.prefill",
        "prefill_worker": "prefill-0",
        "affinity": "new",
        "cached_tokens": None,
        "computed_tokens": None,
        "break": None,
    }
    assert (await bench.get("/v1/sessions/s"))[1]["prefills_ahead"] == 0
    bench.prefill[0].gate.set()
    assert not await bench.settled()
    totals = (await bench.get("/v1/sessions/s"))[1]
    assert (totals["prefills_ahead"], totals["calls"], totals["prompt_tokens"]) == (1, 0, 0)
    assert totals["computed_tokens"] == tokens // BLOCK * BLOCK
    assert await bench.metric('prefillshare_prefills_ahead_total{result="ok"}') == 1


async def test_whoever_waits_learns_what_was_computed(bench: Bench) -> None:
    status, answer, _ = await ahead(bench, wait=True)
    whole = answer["prompt_tokens"] // BLOCK * BLOCK
    assert status == 200
    assert (answer["cached_tokens"], answer["computed_tokens"]) == (0, whole)
    status, again, _ = await ahead(bench, wait=True)
    assert again["affinity"] == "hit"
    assert again["cached_tokens"] == whole
    assert again["computed_tokens"] <= 1


async def test_it_takes_no_lease(bench: Bench) -> None:
    await ahead(bench, wait=True)
    assert bench.cluster.leases == {}
    assert bench.prefill[0].released == []
    assert "kv_transfer_params" not in bench.prefill[0].requests[0]


async def test_the_next_call_computes_only_what_is_new(bench: Bench) -> None:
    _, early, _ = await ahead(bench, wait=True)
    _, answer = await call(bench)
    assert answer["prefillshare"]["cached_tokens"] == early["computed_tokens"]
    assert answer["prefillshare"]["affinity"] == "hit"
    assert answer["prefillshare"]["break"] is None
    totals = (await bench.get("/v1/sessions/s"))[1]
    # As much as the call alone would have computed, and no role was asked before.
    assert totals["computed_tokens"] == answer["usage"]["prompt_tokens"]
    assert totals["per_model_prefill_tokens"] == answer["usage"]["prompt_tokens"]


async def test_a_call_waits_for_what_runs_ahead_of_it(bench: Bench) -> None:
    bench.prefill[0].fault = "slow"
    _, early, _ = await ahead(bench)
    running = asyncio.create_task(call(bench))
    await until(lambda: bench.router.sessions.in_flight == 2)
    await until(lambda: bench.prefill[0].requests)
    assert not running.done()
    assert len(bench.prefill[0].requests) == 1
    bench.prefill[0].gate.set()
    _, answer = await running
    assert answer["prefillshare"]["cached_tokens"] == early["prompt_tokens"] // BLOCK * BLOCK
    assert await bench.metric("prefillshare_prefill_ahead_wait_seconds_count") == 1


async def test_calls_of_other_sessions_do_not_wait(bench: Bench) -> None:
    bench.prefill[0].fault = "slow"
    await ahead(bench)
    await until(lambda: bench.prefill[0].requests)
    bench.prefill[0].fault = None
    assert (await bench.chat(headers={"X-Session-ID": "other"}))[0] == 200
    bench.prefill[0].gate.set()


async def test_several_of_one_session_run_in_the_order_they_came(bench: Bench) -> None:
    bench.prefill[0].fault = "slow"
    texts = ["a question about the weather in Paris " * n for n in (8, 6, 4)]
    answers = [(await ahead(bench, *texts[:n]))[1] for n in range(4)]
    await until(lambda: bench.prefill[0].requests)
    assert len(bench.prefill[0].requests) == 1
    bench.prefill[0].gate.set()
    assert not await bench.settled()
    sent = [len(body["prompt"]) for body in bench.prefill[0].requests]
    assert sent == [answer["prompt_tokens"] // BLOCK * BLOCK for answer in answers]
    totals = (await bench.get("/v1/sessions/s"))[1]
    assert totals["prefills_ahead"] == 4
    assert totals["computed_tokens"] == sent[-1]


async def test_one_that_fails_fails_no_call(bench: Bench) -> None:
    bench.prefill[0].fault = "status_400"
    assert (await ahead(bench))[0] == 202
    assert not await bench.settled()
    bench.prefill[0].fault = None
    assert (await bench.get("/v1/sessions/s"))[0] == 404  # It has nothing anywhere.
    status, answer = await call(bench)
    assert (status, answer["prefillshare"]["affinity"]) == (200, "new")
    assert answer["prefillshare"]["break"] is None
    assert await bench.metric('prefillshare_prefills_ahead_total{result="ok"}') == 0
    assert await bench.metric("prefillshare_prefills_ahead_total") == 1


async def test_whoever_waits_learns_that_it_failed(bench: Bench) -> None:
    bench.prefill[0].fault = "status_400"
    status, answer, _ = await ahead(bench, wait=True)
    assert status == 400
    assert "vocabulary" in answer["error"]["message"]


async def test_a_call_goes_on_without_one_that_takes_too_long(bench: Bench) -> None:
    bench.router.ahead._patience_s = 0.3  # And not `prefill_s`, which bounds the call's own too.
    bench.prefill[0].fault = "hang"
    await ahead(bench)
    await until(lambda: bench.prefill[0].requests)
    bench.prefill[0].fault = None
    assert (await call(bench))[0] == 200
    assert bench.prefill[0].open_requests == 1
    await bench.router.ahead.close()


async def test_it_is_repeated_on_another_worker(start: Start) -> None:
    async with start(prefill=2) as bench:
        bench.prefill[0].fault = "status_500"
        _, answer, _ = await ahead(bench, wait=True)
        assert answer["prefill_worker"] == "prefill-1"
        assert (await call(bench))[1]["prefillshare"]["prefill_worker"] == "prefill-1"


async def test_a_session_that_ends_meanwhile_does_not_come_back(bench: Bench) -> None:
    bench.prefill[0].fault = "slow"
    await ahead(bench)
    await until(lambda: bench.prefill[0].requests)
    async with bench.http.delete(f"{bench.url}/v1/sessions/s") as response:
        assert response.status == 200
    bench.prefill[0].gate.set()
    assert not await bench.settled()
    assert (await bench.get("/v1/sessions/s"))[0] == 404
    assert await bench.metric("prefillshare_session_pins") == 0


async def test_a_session_does_not_expire_while_one_runs(bench: Bench) -> None:
    bench.prefill[0].fault = "slow"
    await ahead(bench)
    bench.router.sessions._ttl_s = 0
    assert bench.router.sessions.sweep() == 0
    bench.prefill[0].gate.set()
    assert not await bench.settled()
    assert bench.router.sessions.sweep() == 1


async def test_the_router_stops_without_waiting_for_it(bench: Bench) -> None:
    bench.prefill[0].fault = "slow"
    await ahead(bench)
    await ahead(bench, "more")
    await until(lambda: bench.prefill[0].requests)
    await bench.router.ahead.close()
    assert not await bench.settled()
    await until(lambda: bench.prefill[0].aborted)


async def test_more_than_the_router_remembers_are_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead_module, "MOST_AT_ONCE", 2)
    bench.prefill[0].fault = "slow"
    assert [(await ahead(bench))[0] for _ in range(3)] == [202, 202, 429]
    bench.prefill[0].gate.set()
    assert not await bench.settled()
    assert (await ahead(bench))[0] == 202


async def test_without_a_worker_it_is_refused_at_once(bench: Bench) -> None:
    bench.router.health.drain("prefill-0")
    status, answer, headers = await ahead(bench)
    assert (status, answer["error"]["code"]) == (503, "no_worker")
    assert "Retry-After" in headers


@pytest.mark.parametrize(
    ("body", "headers", "field", "remedy"),
    [
        ({}, {}, "messages", "non-empty list"),
        ({"messages": []}, {}, "messages", "non-empty list"),
        ({"messages": "hello"}, {}, "messages", "non-empty list"),
        ({"messages": [{"role": "system", "content": "a"}, DOCUMENT]}, {}, "messages", "leave it"),
        ({"messages": [{"role": "developer", "content": "a"}]}, {}, "messages", "leave it out"),
        ({"messages": [DOCUMENT], "tools": [{"type": "function"}]}, {}, "tools", "leave them out"),
        ({"messages": [DOCUMENT], "wait": "no"}, {}, "wait", "true or false"),
        ({"messages": [{"role": "user", "content": 3}]}, {}, "messages[0].content", "string"),
        ({"messages": [DOCUMENT]}, {"X-PrefillShare-Mode": "isolate"}, "x-prefillshare-mode", "no"),
        ({"messages": [DOCUMENT]}, {"X-PrefillShare-Strict": "x"}, "x-prefillshare-strict", "true"),
    ],
)
async def test_what_cannot_be_prefilled_for_every_role_is_a_400(
    bench: Bench, body: Any, headers: dict[str, str], field: str, remedy: str
) -> None:
    status, answer, _ = await bench.post(PATH, body, headers)
    assert (status, answer["error"]["param"]) == (400, field)
    assert remedy in answer["error"]["message"]
    assert not bench.prefill[0].requests
    assert (await bench.get("/v1/sessions/s"))[0] == 404


async def test_the_path_names_the_session_whatever_a_header_says(bench: Bench) -> None:
    _, answer, _ = await ahead(bench, headers={"X-Session-ID": "other"}, wait=True)
    assert answer["id"] == "s"
    assert (await bench.get("/v1/sessions/other"))[0] == 404


async def test_a_child_starts_with_its_parents_context(bench: Bench) -> None:
    _, early, _ = await ahead(bench, wait=True)
    body = {"messages": context("more " * 40), "wait": True}
    child = {"X-Parent-Session-ID": "s"}
    _, answer, _ = await bench.post("/v1/sessions/child/prefill", body, child)
    assert answer["affinity"] == "hit"
    assert answer["cached_tokens"] == early["computed_tokens"]


async def test_a_context_of_less_than_a_block_pins_the_session(bench: Bench) -> None:
    body = {"messages": [{"role": "user", "content": "yes"}], "wait": True}
    _, answer, _ = await bench.post(PATH, body)
    assert answer["prompt_tokens"] < BLOCK
    assert (answer["cached_tokens"], answer["computed_tokens"]) == (0, 0)
    assert (await bench.get("/v1/sessions/s"))[1]["prefill_worker"] == "prefill-0"


async def test_a_break_is_told_where_it_happens(bench: Bench) -> None:
    await ahead(bench, "the weather", wait=True)
    again = {**DOCUMENT, "content": DOCUMENT["content"] + "again"}
    changed = [again, *context("the weather")[1:], {"role": "assistant", "content": "yes"}]
    _, answer, headers = await bench.post(PATH, {"messages": changed})
    assert answer["break"]["cause"] == "message_edited"
    assert "message_edited" in headers["X-PrefillShare-Break"]
    body = {"model": "alpha", "messages": changed}
    _, later, _ = await bench.post("/v1/chat/completions", body, SESSION)
    assert later["prefillshare"]["break"] is None
    assert await bench.metric('prefillshare_prefix_breaks_total{cause="message_edited"') == 1


async def test_a_strict_one_that_breaks_is_refused(bench: Bench) -> None:
    await ahead(bench, "the weather", wait=True)
    changed = {"messages": context("the weather")[1:]}
    status, answer, _ = await bench.post(PATH, changed, {"X-PrefillShare-Strict": "true"})
    assert (status, answer["error"]["code"]) == (422, "prefix_break")
    assert len(bench.prefill[0].requests) == 1


async def test_what_waits_is_not_computed_once_its_session_has_ended(bench: Bench) -> None:
    bench.prefill[0].fault = "slow"
    for number in range(3):
        assert (await ahead(bench, f"question {number}"))[0] == 202
    waiting = asyncio.create_task(ahead(bench, "question 3", wait=True))
    await until(lambda: bench.router.sessions.in_flight == 4 and bench.prefill[0].requests)
    async with bench.http.delete(f"{bench.url}/v1/sessions/s") as response:
        assert response.status == 200
    bench.prefill[0].gate.set()
    status, answer, _ = await waiting
    assert not await bench.settled()
    assert (status, answer["error"]["code"]) == (404, "session_not_found")
    assert len(bench.prefill[0].requests) == 1
    label = 'prefillshare_prefills_ahead_total{result="session_not_found"}'
    assert await bench.metric(label) == 3
