"""What the client sees when a worker or the client itself fails, and that all counts drain."""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.router.conftest import Bench, Start, until

SESSION = {"X-Session-ID": "s"}


def code_of(body: Any) -> Any:
    return body["error"]["code"]


BRIEFLY = {"timeouts": {"queue_s": 0.3}}
"""Calls do not wait long for workers that do not come back."""


async def test_a_dead_prefill_worker_is_a_503_that_names_it(start: Start) -> None:
    async with start(settings=BRIEFLY) as bench:
        await bench.prefill[0].stop()
        status, body, headers = await bench.chat()
        assert (status, code_of(body)) == (503, "no_worker")
        assert "prefill-0: could not be reached" in body["error"]["message"]
        assert int(headers["Retry-After"]) > 0


@pytest.mark.parametrize("dead", [True, False])
async def test_a_soft_pin_moves_once_when_its_worker_is_gone(start: Start, dead: bool) -> None:
    async with start(prefill=2) as bench:
        _, first, _ = await bench.chat(headers=SESSION)
        [home] = [w for w in bench.prefill if w.id == first["prefillshare"]["prefill_worker"]]
        if dead:
            await home.stop()
        else:
            home.fault = "drop"
        _, second, _ = await bench.chat(headers=SESSION)
        assert second["prefillshare"]["affinity"] == "rebound"
        assert second["prefillshare"]["prefill_worker"] != home.id
        _, third, _ = await bench.chat(headers=SESSION)
        assert third["prefillshare"]["affinity"] == "hit"
        assert third["prefillshare"]["prefill_worker"] == second["prefillshare"]["prefill_worker"]
        assert await bench.metric("prefillshare_session_rebinds_total") == 1


async def test_a_hard_pin_fails_when_its_worker_is_gone(start: Start) -> None:
    async with start(prefill=2, settings={"router": {"affinity": "hard"}, **BRIEFLY}) as bench:
        _, first, _ = await bench.chat(headers=SESSION)
        [home] = [w for w in bench.prefill if w.id == first["prefillshare"]["prefill_worker"]]
        await home.stop()
        for _ in range(2):
            status, body, _ = await bench.chat(headers=SESSION)
            assert (status, code_of(body)) == (503, "no_worker")
            assert f"prefill worker {home.id}, to which" in body["error"]["message"]


async def test_a_new_session_finds_the_worker_that_lives(start: Start) -> None:
    async with start(prefill=2) as bench:
        await bench.prefill[0].stop()
        for number in range(3):
            status, body, _ = await bench.chat(headers={"X-Session-ID": f"s{number}"})
            assert (status, body["prefillshare"]["affinity"]) == (200, "new")


async def test_a_failed_first_prefill_leaves_no_session(bench: Bench) -> None:
    bench.prefill[0].fault = "status_500"
    status, body, _ = await bench.chat(headers=SESSION)
    assert (status, code_of(body)) == (502, "prefill_failed")
    assert (await bench.get("/v1/sessions/s"))[0] == 404
    assert await bench.metric("prefillshare_session_pins") == 0


async def test_a_prompt_the_base_refuses_is_the_clients_error(bench: Bench) -> None:
    bench.prefill[0].fault = "status_400"
    status, body, _ = await bench.chat()
    assert status == 400
    assert "vocabulary" in body["error"]["message"]


async def test_a_silent_prefill_worker_is_a_504_with_the_phase(start: Start) -> None:
    async with start(settings={"timeouts": {"prefill_s": 0.2}}) as bench:
        bench.prefill[0].fault = "hang"
        status, body, _ = await bench.chat()
        assert (status, code_of(body)) == (504, "prefill_timeout")
        assert "prefill" in body["error"]["message"]


async def test_without_kv_blocks_nothing_is_decoded(bench: Bench) -> None:
    bench.prefill[0].fault = "no_blocks"
    status, body, _ = await bench.chat(headers=SESSION)
    assert (status, code_of(body)) == (502, "kv_handoff_missing")
    assert bench.decode["alpha-0"].requests == []
    assert await bench.metric("prefillshare_handoff_failures_total") == len(
        bench.prefill[0].requests
    )


async def test_a_dead_decode_worker_is_a_503_that_names_it_and_its_lease_is_given_back(
    start: Start,
) -> None:
    async with start(settings=BRIEFLY) as bench:
        await bench.decode["alpha-0"].stop()
        status, body, _ = await bench.chat()
        assert (status, code_of(body)) == (503, "no_worker")
        assert "alpha-0: could not be reached" in body["error"]["message"]
        assert not await bench.settled()
        assert bench.prefill[0].released == bench.prefill[0].request_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_workers_4xx_reaches_the_client_in_openais_words(
    bench: Bench, stream: bool
) -> None:
    bench.decode["alpha-0"].fault = "status_400"
    status, body, _ = await bench.chat(stream=stream)
    assert status == 400
    assert body["error"] == {
        "message": "temperature must be non-negative",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_value",
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("status_500", 502, "decode_failed"),
        ("refuse_missing", 502, "base_kv_missing"),
        ("refuse_taken", 502, "handoff_taken"),
        ("refuse_lease", 503, "lease_expired"),
    ],
)
async def test_what_no_client_can_cause_is_a_5xx(
    bench: Bench, fault: Any, status: int, code: str, stream: bool
) -> None:
    bench.decode["alpha-0"].fault = fault
    answered, body, _ = await bench.chat(stream=stream)
    assert (answered, code_of(body)) == (status, code)


async def test_a_preempted_call_is_an_error_and_counted(bench: Bench) -> None:
    bench.decode["alpha-0"].fault = "preempted"
    status, body, _ = await bench.chat()
    assert (status, code_of(body)) == (503, "decode_preempted")
    attempts = len(bench.decode["alpha-0"].requests)
    assert await bench.metric("prefillshare_decode_preemptions_total") == attempts


@pytest.mark.parametrize("told", ["by its mark", "by its missing account"])
async def test_an_answer_that_broke_off_after_a_tool_call_is_no_answer(
    bench: Bench, told: str
) -> None:
    """vLLM says "tool_calls" there, for an answer that is not streamed."""
    worker = bench.decode["alpha-0"]
    worker.tool_calls = [{"id": "c", "type": "function", "function": {"name": "f"}}]
    worker.keeps_accounts = told == "by its mark"
    worker.fault = "preempted_after_call" if told == "by its mark" else None
    status, body, _ = await bench.chat()
    code = "decode_preempted" if told == "by its mark" else "decode_aborted"
    assert (status, code_of(body)) == (503, code)


async def test_an_account_is_asked_for_again_before_an_answer_is_doubted(bench: Bench) -> None:
    worker = bench.decode["alpha-0"]
    worker.tool_calls = [{"id": "c", "type": "function", "function": {"name": "f"}}]
    worker.dropped_accounts = 1
    status, body, _ = await bench.chat()
    assert (status, body["prefillshare"]["resumed"]) == (200, 0)
    assert len(worker.requests) == 1


async def test_a_stream_without_a_single_token_fails_with_its_cause(bench: Bench) -> None:
    """vLLM sends just `[DONE]` there; the worker's account knows why."""
    bench.decode["alpha-0"].fault = "no_finish"
    status, body, _ = await bench.chat(stream=True)
    assert (status, code_of(body)) == (503, "kv_load_failed")


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("preempted", "decode_preempted"),
        ("error_midway", "decode_failed"),
        ("drop_midway", "worker_unreachable"),
    ],
)
async def test_after_the_first_byte_a_failure_is_an_error_event_without_done(
    bench: Bench, fault: Any, code: str
) -> None:
    bench.decode["alpha-0"].fault = fault
    events = await bench.stream()
    assert "alpha says" in str(events[:-1])
    assert code_of(events[-1]) == code
    assert await bench.metric("prefillshare_stream_errors_total") == 1


async def test_after_the_first_byte_silence_is_an_error_event_without_done(start: Start) -> None:
    async with start(settings={"timeouts": {"idle_stream_s": 0.5}}) as bench:
        bench.decode["alpha-0"].fault = "hang_midway"
        # The first event of a completion has text, and is waited for without the short limit.
        events = await bench.events("/v1/completions", {"model": "alpha", "prompt": "a"})
        assert "alpha says" in str(events[:-1])
        assert code_of(events[-1]) == "idle_stream_timeout"
        assert await bench.metric("prefillshare_stream_errors_total") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_silent_decode_worker_is_a_504_with_the_phase(start: Start, stream: bool) -> None:
    async with start(settings={"timeouts": {"first_token_s": 0.2}}) as bench:
        bench.decode["alpha-0"].fault = "hang"
        bench.router.decode.patience_s_per_token = 0.0
        status, body, _ = await bench.chat(stream=stream)
        assert status == 504
        assert code_of(body) == ("first_token_timeout" if stream else "decode_timeout")


async def test_one_refused_choice_ends_the_others(start: Start) -> None:
    async with start(decode=("alpha-0", "alpha-1")) as bench:
        silent, refusing = bench.decode.values()
        silent.fault, refusing.fault = "hang", "status_400"
        refusing.gate.clear()
        calling = asyncio.create_task(bench.chat(n=2))
        await until(lambda: silent.requests and refusing.requests)
        refusing.gate.set()
        status, body, _ = await calling
        assert (status, code_of(body)) == (400, "invalid_value")
        assert not await bench.settled()
        assert silent.aborted == 1


async def leave(bench: Bench, when: Callable[[], object] | None, **fields: Any) -> None:
    """Start a call and close its connection: after the first bytes, or once `when` holds."""
    body = {"model": "alpha", "messages": [{"role": "user", "content": "a"}], **fields}
    async with aiohttp.ClientSession() as http:

        async def call() -> None:
            url = f"{bench.url}/v1/chat/completions"
            async with http.post(url, json=body, headers=SESSION) as response:
                await response.content.readany()
                if when is None:
                    return
                await response.read()

        task = asyncio.create_task(call())
        if when is None:
            await task
        else:
            await until(when)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_client_that_leaves_a_stream_aborts_it_at_the_worker(bench: Bench) -> None:
    worker = bench.decode["alpha-0"]
    worker.pace = asyncio.Semaphore(1)
    await leave(bench, None, stream=True)
    assert not await bench.settled()
    assert worker.aborted == 1
    assert await bench.counted("prefillshare_router_requests_total", 1) == 1


async def test_a_client_that_leaves_aborts_every_choice(bench: Bench) -> None:
    worker = bench.decode["alpha-0"]
    worker.pace = asyncio.Semaphore(1)
    await leave(bench, lambda: worker.open_requests == 3, stream=True, n=3)
    assert not await bench.settled()
    assert worker.aborted == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_aborts_decode(
    bench: Bench, stream: bool
) -> None:
    worker = bench.decode["alpha-0"]
    worker.fault = "hang"
    await leave(bench, lambda: worker.open_requests, stream=stream)
    assert not await bench.settled()
    assert worker.aborted == 1


async def test_a_client_that_leaves_during_a_long_prefill_aborts_it(bench: Bench) -> None:
    worker = bench.prefill[0]
    worker.fault = "hang"
    await leave(bench, lambda: worker.open_requests)
    assert not await bench.settled()
    assert worker.aborted == 1
    assert bench.decode["alpha-0"].requests == []


async def test_a_lease_granted_after_the_client_left_is_given_back(bench: Bench) -> None:
    worker = bench.prefill[0]
    worker.fault = "grant_unseen"
    await leave(bench, lambda: worker.request_ids)
    assert not await bench.settled()
    assert worker.released == worker.request_ids
    assert bench.decode["alpha-0"].requests == []
    assert (await bench.get("/v1/sessions/s"))[0] == 404


async def test_leases_that_nobody_took_are_given_back(start: Start) -> None:
    """The second prefill of a call fails when the first has its lease already."""
    async with start() as bench:
        worker = bench.prefill[0]
        made = worker._lease

        def once(*call: Any) -> dict[str, Any]:
            worker.fault = "status_400"
            return made(*call)

        worker._lease = once  # type: ignore[method-assign,assignment]
        status, _, _ = await bench.chat(n=2)
        assert status == 400
        assert not await bench.settled()
        assert worker.released == worker.request_ids[:1]
        assert bench.decode["alpha-0"].requests == []
