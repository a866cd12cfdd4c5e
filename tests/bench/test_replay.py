"""A workload is sent as it says, and whatever comes of it is recorded."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from prefillshare_bench.records import CallRecord, Replay
from prefillshare_bench.replay import replay
from prefillshare_bench.traces import Call, Context, RecordedCall, Session, Workload
from tests.bench.conftest import (
    MockServer,
    answer,
    chunk,
    computed_once,
    served,
    small,
    usage,
)
from tests.router.conftest import Start

TEST_S = 120
"""Far longer than any of these takes."""


async def run(workload: Workload, server: MockServer, **options: Any) -> Replay:
    urls = {role: [server.url] for role in workload.roles}
    options = {"limit": 1, **options} if "rate" not in options else options
    async with asyncio.timeout(TEST_S):
        return await replay(workload, urls, **options)


async def test_prompts_are_drawn_tokens_and_what_was_generated(server: MockServer) -> None:
    await run(small(), server)
    first, second, third = (request["prompt"] for request in server.requests)
    assert [len(first), len(second), len(third)] == [59, 82, 106]
    # The mock's tokens are the length of the prompt that it answers.
    assert second[56:60] == [59] * 4
    assert third[80:83] == [82] * 3
    context = Context(small(), small().sessions[0])
    assert first == context.prompt(0)
    assert second[:56] == first[:56]


async def test_a_call_asks_for_so_many_tokens_and_their_ids(server: MockServer) -> None:
    await run(small(), server)
    request = server.requests[0]
    del request["prompt"]
    assert request == {
        "path": "/v1/completions",
        "model": "alpha",
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


async def test_a_call_is_recorded_as_the_client_saw_it(server: MockServer) -> None:
    server.script = lambda body: [
        chunk(1),
        chunk(2, 3),
        chunk(4, finish="length"),
        usage(59, 4, cached=16),
        "[DONE]",
    ]
    done = await run(small(Call(role="alpha", new=40, tail=3, answer=4)), server)
    [call] = done.calls
    assert call.ok
    assert (call.session, call.index, call.role, call.status) == ("s0", 0, "alpha", 200)
    assert (call.prompt_tokens, call.cached_tokens, call.computed_tokens) == (59, 16, 43)
    assert (call.generated, call.ids) == (4, (1, 2, 3, 4))
    assert len(call.itl_ms) == 3
    assert call.itl_ms[0] == call.itl_ms[1]
    assert call.first_s is not None
    assert 0 <= call.arrived_s <= call.sent_s <= call.first_s <= call.last_s == done.wall_s
    assert 1000 * (call.last_s - call.first_s) == pytest.approx(sum(call.itl_ms), abs=0.01)
    assert call.prefill_worker == call.decode_worker == server.url


async def test_events_may_come_in_any_pieces(server: MockServer) -> None:
    whole = b'data: {"choices": [{"text": "a", "token_ids": [5], "finish_reason": "length"}]}\n\n'
    server.script = lambda body: [
        *(whole[at : at + 1] for at in range(len(whole))),
        b": a comment\r\n\r\nevent: x\nda",
        b'ta:{"choices":[],"usage":{"prompt_tokens":59}}\r\n\r\ndata: [DONE]\n\n',
    ]
    done = await run(small(Call(role="alpha", new=40, tail=3, answer=1)), server)
    assert done.calls[0].ok
    assert (done.calls[0].ids, done.calls[0].prompt_tokens) == ((5,), 59)


async def test_every_call_names_its_session_and_the_last_one_ends_it(server: MockServer) -> None:
    await run(small(sessions=2), server)
    sessions = [headers["X-Session-ID"] for headers in server.headers]
    assert sessions == ["small-7-s0"] * 3 + ["small-7-s1"] * 3
    final = [headers.get("X-Session-Final") for headers in server.headers]
    assert final == [None, None, "true"] * 2
    assert server.ended == []


@pytest.mark.parametrize("name", ["a/b c", "Grüße\r\nX: y", "x" * 1000])
async def test_a_session_may_have_any_name(start: Start, name: str) -> None:
    session = Session(id=name, arrival=0, calls=(Call(role="alpha", new=9, tail=1, answer=2),) * 2)
    workload = Workload(name="w", roles=("alpha",), sessions=(session,))
    async with start() as bench:
        bench.decode["alpha-0"].script = lambda body: []
        async with asyncio.timeout(TEST_S):
            done = await replay(workload, {"alpha": [bench.url]}, limit=1, router=True)
        assert (done.calls[0].session, done.calls[0].status) == (name, 200)
        assert done.calls[0].error == "1 tokens were generated and not 2 (finish_reason 'stop')"
        assert await bench.metric("prefillshare_session_pins") == 0


async def test_the_next_role_is_told_only_where_that_is_asked_for(server: MockServer) -> None:
    await run(small(), server, next_role=True)
    await run(small(), server)
    told = [headers.get("X-PrefillShare-Next-Role") for headers in server.headers]
    assert told == ["beta", "alpha", None, None, None, None]


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_so_many_sessions_run_at_once(server: MockServer, limit: int) -> None:
    server.gather = limit
    done = await run(small(sessions=6), server, limit=limit)
    assert server.most_at_once == limit
    assert len(done.calls) == 18


async def test_sessions_arrive_as_the_workload_has_it_whatever_the_rate(server: MockServer) -> None:
    done = await run(small(sessions=3), server, rate=100)
    first = {call.session: call.arrived_s for call in done.calls if call.index == 0}
    assert first == {"s0": 0.0, "s1": 0.01, "s2": 0.02}
    assert all(call.sent_s >= call.arrived_s for call in done.calls)


async def test_sessions_that_wait_for_others_waited_since_they_arrived(server: MockServer) -> None:
    done = await run(small(sessions=3), server, rate=1e6, limit=1)
    assert server.most_at_once == 1
    by_session = done.sessions()
    assert by_session["s2"][0].arrived_s == pytest.approx(0, abs=1e-5)
    assert by_session["s2"][0].sent_s >= by_session["s1"][-1].last_s


async def test_a_session_keeps_to_one_of_its_roles_servers() -> None:
    async with served(MockServer()) as one, served(MockServer()) as other:
        urls = {"alpha": [one.url, other.url], "beta": [one.url, other.url]}
        await replay(small(sessions=4), urls, limit=4)
    for server, sessions in ((one, {"s0", "s2"}), (other, {"s1", "s3"})):
        assert {h["X-Session-ID"].rpartition("-")[2] for h in server.headers} == sessions
        assert len(server.requests) == 6


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refused_session_is_recorded_and_not_tried_again(
    server: MockServer, status: int
) -> None:
    server.refuse = lambda body: status if len(server.requests) == 1 else 200
    done = await run(small(sessions=2), server, router=True)
    refused, *others = done.calls
    assert (refused.status, refused.error) == (status, "queue_full: no room")
    assert not refused.ok
    assert (refused.first_s, refused.generated, refused.prompt_tokens) == (None, 0, None)
    assert [call.session for call in others] == ["s1"] * 3
    assert all(call.ok for call in others)


FAULTS: dict[str, tuple[Any, str]] = {
    "error": ([chunk(1), {"error": {"message": "engine died", "code": 500}}], "engine died"),
    "cut": ([chunk(1), chunk(2)], "the stream ended before the answer"),
    "short": ([chunk(1, 2, finish="stop"), "[DONE]"], "2 tokens were generated and not 4"),
    "long": ([chunk(1, 2, 3, 4, 5, finish="stop"), "[DONE]"], "5 tokens were generated and not 4"),
    "no json": (["{"], "an event is no JSON object"),
    "no object": (["[]"], "an event is no JSON object"),
    "no choices": ([{"choices": [3]}], "an event is no chunk of an answer"),
    "no ids": (
        [*[{"choices": [{"text": "x"}]}] * 3, {"choices": [{"text": "x", "finish_reason": "l"}]}],
        "the server sent no token ids",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_broken_answer_ends_its_session_and_no_other(
    server: MockServer, fault: str
) -> None:
    events, said = FAULTS[fault]
    server.script = lambda body: events if len(server.requests) == 1 else answer(body)
    done = await run(small(sessions=2), server, router=True)
    assert [(call.session, call.ok) for call in done.calls] == [
        ("s0", False),
        *[("s1", True)] * 3,
    ]
    assert said in (done.calls[0].error or "")
    assert server.ended == ["small-7-s0"]


async def test_a_server_that_says_nothing_is_given_up(server: MockServer) -> None:
    # The first call: on a busy machine one that is answered may take as long.
    server.silent_for = frozenset({"alpha"})
    done = await run(small(), server, silence_s=0.05)
    [call] = done.calls
    assert not call.ok
    assert "timeout" in (call.error or "").lower()
    assert call.status == 0


async def test_a_call_that_takes_too_long_is_given_up(server: MockServer) -> None:
    server.silent_for = frozenset({"alpha"})
    done = await run(small(), server, call_s=0.05)
    assert "timeout" in (done.calls[0].error or "").lower()


async def test_a_server_that_is_not_there_fails_every_session() -> None:
    with socket.socket() as deaf:
        # Its port stays taken, lest another process listens there.
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        urls = {role: [url] for role in ("alpha", "beta")}
        done = await replay(small(sessions=2), urls, limit=2, router=True)
    assert [(call.index, call.status, call.ok) for call in done.calls] == [(0, 0, False)] * 2
    assert all("connect" in (call.error or "").lower() for call in done.calls)


async def test_a_cancelled_run_ends_its_sessions(server: MockServer) -> None:
    server.silent_for = frozenset({"beta"})
    waiting = asyncio.Event()
    urls = {role: [server.url] for role in ("alpha", "beta")}
    running = asyncio.create_task(
        replay(small(), urls, limit=1, router=True, on_call=lambda call: waiting.set())
    )
    async with asyncio.timeout(TEST_S):
        await waiting.wait()
        while len(server.requests) < 2:
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert server.ended == ["small-7-s0"]


async def test_every_call_is_told_as_it_ends(server: MockServer) -> None:
    told: list[CallRecord] = []
    done = await run(small(sessions=2), server, on_call=told.append)
    assert told == list(done.calls)


async def test_a_recorded_call_is_sent_as_it_was_logged(server: MockServer) -> None:
    logged = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"enable_thinking": False},
        "tool_choice": "required",
        "max_completion_tokens": 900,
        "stop": ["\n"],
        "temperature": 0.7,
        "n": 2,
    }
    call = RecordedCall(role="alpha", request=logged, answer=3)
    session = Session(id="s", arrival=0, calls=(call,))
    done = await run(Workload(name="w", roles=("alpha",), sessions=(session,)), server)
    assert done.calls[0].ok
    assert server.requests[0] == {
        "path": "/v1/chat/completions",
        "model": "alpha",
        "messages": logged["messages"],
        "tools": logged["tools"],
        "tool_choice": "none",
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


async def test_chunks_of_chat_without_ids_count_as_a_token_each(server: MockServer) -> None:
    def delta(said: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": said, "finish_reason": finish}]}

    server.script = lambda body: [
        delta({"role": "assistant", "content": ""}),
        delta({"reasoning": "hm"}),
        delta({"content": "yes"}, "length"),
        "[DONE]",
    ]
    call = RecordedCall(role="alpha", request={"messages": []}, answer=2)
    session = Session(id="s", arrival=0, calls=(call,))
    done = await run(Workload(name="w", roles=("alpha",), sessions=(session,)), server)
    assert (done.calls[0].error, done.calls[0].generated) == (None, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "neither rate nor limit"),
        ({"rate": 0}, "rate is 0"),
        ({"limit": 0}, "limit is 0"),
        ({"limit": 1, "urls": {"alpha": ["http://x"], "beta": []}}, "urls has none for beta"),
    ],
)
async def test_a_run_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    urls = options.pop("urls", {"alpha": ["http://x"], "beta": ["http://x"]})
    with pytest.raises(ValueError, match=said):
        await replay(small(), urls, **options)


async def test_a_real_router_says_what_was_cached_and_who_did_it(start: Start) -> None:
    workload = small()
    async with start(prefill=2) as bench:
        for worker in bench.decode.values():
            # One piece of text may have several tokens, and the mock adds one at the end.
            worker.script = lambda body: [" yes"] * (body["max_tokens"] - 1)
        yes = bench.cluster.tokenizer.encode(" yes", add_special_tokens=False).ids
        assert len(yes) == 1
        urls = {role: [bench.url] for role in workload.roles}
        async with asyncio.timeout(TEST_S):
            done = await replay(workload, urls, limit=1, router=True, next_role=True)
        assert [call.error for call in done.calls] == [None] * 3
        assert [call.prompt_tokens for call in done.calls] == [59, 82, 106]
        computed = [call.computed_tokens or 0 for call in done.calls]
        assert sum(computed) == computed_once(workload, block_size=16)
        assert done.calls[1].cached_tokens == 48
        assert [call.decode_worker for call in done.calls] == ["alpha-0", "beta-0", "alpha-0"]
        assert len({call.prefill_worker for call in done.calls}) == 1
        assert all(call.handoff_bytes for call in done.calls)
        assert [len(call.ids or ()) for call in done.calls] == [4, 3, 2]
        assert (await bench.get("/v1/sessions/small-7-s0"))[0] == 404


async def test_a_session_that_fails_is_ended_at_the_router(start: Start) -> None:
    async with start() as bench:
        bench.decode["beta-0"].fault = "status_400"
        bench.decode["alpha-0"].script = lambda body: [" yes"] * (body["max_tokens"] - 1)
        urls = {role: [bench.url] for role in ("alpha", "beta")}
        async with asyncio.timeout(TEST_S):
            done = await replay(small(), urls, limit=1, router=True)
        assert [call.status for call in done.calls] == [200, 400]
        assert (await bench.get("/v1/sessions/small-7-s0"))[0] == 404
