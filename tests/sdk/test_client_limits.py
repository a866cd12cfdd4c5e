"""A client's calls keep to the limits of the session they belong to, and count in it."""

import asyncio
import gc
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest

from prefillshare_agents import (
    AsyncOpenAI,
    AsyncSession,
    ContextWindowError,
    OpenAI,
    Session,
    TokenBudgetError,
)
from prefillshare_agents.testing import FakeServer

LONG: Any = {"role": "user", "content": "far " * 900}
SHORT: Any = {"role": "user", "content": "How far?"}
USAGE: Any = {"include_usage": True}


@pytest.fixture
def client(server: FakeServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url, api_key="local") as made:
        yield made


@pytest.fixture
async def aclient(server: FakeServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=server.url, api_key="local") as made:
        yield made


def send(client: OpenAI, message: Any = SHORT, **options: Any) -> Any:
    return client.chat.completions.create(model="planner", messages=[message], **options)


async def asend(client: AsyncOpenAI, message: Any = SHORT, **options: Any) -> Any:
    return await client.chat.completions.create(model="planner", messages=[message], **options)


def paths(server: FakeServer) -> list[str]:
    return [request.path for request in server.requests]


def spent(session: Session | AsyncSession) -> int:
    return session.usage.prompt_tokens + session.usage.completion_tokens


@pytest.mark.parametrize("server", [{"max_model_len": 800}], indirect=True)
async def test_a_call_over_the_window_is_counted_and_not_sent(
    server: FakeServer, client: OpenAI, aclient: AsyncOpenAI
) -> None:
    with Session(), pytest.raises(ContextWindowError, match="the context window is 800"):
        send(client, LONG)
    async with AsyncSession():
        with pytest.raises(ContextWindowError, match="the context window is 800"):
            await asend(aclient, LONG)

    assert paths(server) == ["/tokenize"] * 2


async def test_a_call_over_the_budget_is_not_sent(
    server: FakeServer, client: OpenAI, aclient: AsyncOpenAI
) -> None:
    with Session(token_budget=60):
        send(client, max_tokens=8)
        with pytest.raises(TokenBudgetError, match="token_budget is 60"):
            send(client, max_tokens=60)
    async with AsyncSession(token_budget=60):
        await asend(aclient, max_tokens=8)
        with pytest.raises(TokenBudgetError, match="token_budget is 60"):
            await asend(aclient, max_tokens=60)

    assert len(server.chats) == 2


async def test_either_kind_of_client_keeps_to_either_kind_of_session(
    client: OpenAI, aclient: AsyncOpenAI
) -> None:
    with Session(token_budget=5), pytest.raises(TokenBudgetError):
        await asend(aclient)
    async with AsyncSession(token_budget=5):
        with pytest.raises(TokenBudgetError):
            send(client)


def test_a_session_given_to_the_client_has_its_limits(server: FakeServer) -> None:
    session = Session(token_budget=5)
    with (
        OpenAI(base_url=server.url, api_key="local", session=session) as client,
        pytest.raises(TokenBudgetError),
    ):
        send(client)


def test_a_session_known_by_its_id_has_no_limits(server: FakeServer, client: OpenAI) -> None:
    Session("s1", token_budget=5)
    send(client.with_options(session="s1"), LONG)

    assert paths(server) == ["/v1/chat/completions"]


def test_a_header_that_names_the_blocks_session_means_that_session(client: OpenAI) -> None:
    with Session("s1", token_budget=5), pytest.raises(TokenBudgetError):
        send(client, extra_headers={"x-session-id": "s1"})


def test_a_call_that_names_another_session_is_none_of_the_blocks(client: OpenAI) -> None:
    with Session("s1", token_budget=5) as session:
        send(client, extra_headers={"x-session-id": "s2"})
        send(client, extra_headers={"x-session-id": openai.Omit()})

    assert session.calls == ()


async def test_the_sessions_own_chats_are_counted_once_inside_its_block(
    server: FakeServer,
) -> None:
    with Session(base_url=server.url, messages=[LONG], token_budget=9000) as session:
        session.chat("planner")
        for _ in session.chat("planner", stream=True):
            pass
        session.close()
    async with AsyncSession(
        base_url=server.url, messages=[LONG], token_budget=9000
    ) as asynchronous:
        await asynchronous.chat("planner")
        await asynchronous.close()

    assert session.usage.calls == 2
    assert asynchronous.usage.calls == 1
    assert paths(server).count("/tokenize") == 3


def whole(client: OpenAI) -> None:
    send(client)


def raw(client: OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(model="planner", messages=[SHORT])
    assert answer.parse().choices


def parsed(client: OpenAI) -> None:
    client.chat.completions.parse(model="planner", messages=[SHORT])


def streamed(client: OpenAI) -> None:
    assert list(send(client, stream=True, stream_options=USAGE))


def raw_streamed(client: OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model="planner", messages=[SHORT], stream=True, stream_options=USAGE
    )
    assert list(answer.parse())


def helper(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="planner", messages=[SHORT], stream_options=USAGE
    ) as stream:
        assert list(stream)


@pytest.mark.parametrize("way", [whole, raw, parsed, streamed, raw_streamed, helper])
def test_every_way_to_call_counts_what_the_server_counts(
    way: Any, client: OpenAI, server: FakeServer
) -> None:
    with client.session(token_budget=1000) as session:
        way(client)

    [call] = session.calls
    totals = session.totals()
    assert call.role == "planner"
    assert call.prompt_tokens == totals.prompt_tokens
    assert call.completion_tokens == totals.generated_tokens
    assert call.finish_reason == "stop"
    assert call.wall_s > 0
    assert (call.ttft_s is not None) == (way in (streamed, raw_streamed, helper))


async def test_asynchronous_calls_count_too(aclient: AsyncOpenAI) -> None:
    async with aclient.session(token_budget=1000) as session:
        await asend(aclient)
        async for _ in await asend(aclient, stream=True, stream_options=USAGE):
            pass
        stream = await aclient.chat.completions.with_raw_response.create(
            model="planner", messages=[SHORT], stream=True, stream_options=USAGE
        )
        async for _ in stream.parse():
            pass

    totals = await session.totals()
    assert session.usage.calls == totals.calls == 3
    assert spent(session) == totals.prompt_tokens + totals.generated_tokens


def test_of_a_stream_without_usage_the_prompt_counts(client: OpenAI) -> None:
    with client.session() as session:
        assert list(send(client, stream=True))

    assert session.usage.prompt_tokens == session.totals().prompt_tokens
    assert session.usage.completion_tokens == 0


def test_a_stream_that_is_cut_short_does_not_count(client: OpenAI, server: FakeServer) -> None:
    server.cut_stream()
    with Session() as session:
        assert list(send(client, stream=True))

    assert session.calls == ()


def test_calls_in_threads_do_not_exceed_the_budget_together(
    client: OpenAI, server: FakeServer
) -> None:
    gate = threading.Event()
    server.delay(gate)
    refused: list[TokenBudgetError] = []
    session = Session(token_budget=100)

    def work() -> None:
        try:
            with session:
                send(client, max_tokens=40)
        except TokenBudgetError as error:
            refused.append(error)
            gate.set()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.wait(60)
    gate.set()
    for thread in threads:
        thread.join()

    assert refused
    assert spent(session) <= 100


async def test_calls_in_tasks_do_not_exceed_the_budget_together(
    aclient: AsyncOpenAI, server: FakeServer
) -> None:
    gate = threading.Event()
    server.delay(gate)
    async with AsyncSession(token_budget=100) as session:
        tasks = [asyncio.create_task(asend(aclient, max_tokens=40)) for _ in range(4)]
        await asyncio.to_thread(server.wait_for_chats, 1, 60)
        done, _ = await asyncio.wait(tasks, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        gate.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(task.exception()) for task in done] == [TokenBudgetError] * len(done) != []
    assert len(server.chats) < len(outcomes)
    assert spent(session) <= 100


def closed(stream: Any) -> None:
    stream.close()


def left(stream: Any) -> None:
    with stream:
        next(stream)


@pytest.mark.parametrize("end", [closed, left, next, bool, list])  # next, bool: and then dropped
def test_a_streams_tokens_are_set_aside_until_it_ends(end: Any, client: OpenAI) -> None:
    with Session(token_budget=200):
        stream: Any = send(client, max_tokens=120, stream=True)
        with pytest.raises(TokenBudgetError, match="set aside for running calls"):
            send(client, max_tokens=120)
        end(stream)
        del stream
        gc.collect()
        send(client, max_tokens=120)


async def test_an_asynchronous_streams_tokens_are_set_aside_until_it_ends(
    aclient: AsyncOpenAI,
) -> None:
    async with AsyncSession(token_budget=200):
        stream = await asend(aclient, max_tokens=120, stream=True)
        with pytest.raises(TokenBudgetError, match="set aside for running calls"):
            await asend(aclient, max_tokens=120)
        await stream.close()
        await asend(aclient, max_tokens=120)


def test_what_is_read_as_it_comes_is_free_again_when_closed(client: OpenAI) -> None:
    with Session(token_budget=200) as session:
        with client.chat.completions.with_streaming_response.create(
            model="planner", messages=[SHORT], max_tokens=120
        ) as answer:
            with pytest.raises(TokenBudgetError):
                send(client, max_tokens=120)
            answer.read()
        send(client, max_tokens=120)

    assert session.usage.calls == 1


async def test_a_call_that_fails_or_is_cancelled_sets_nothing_aside(
    server: FakeServer, client: OpenAI, aclient: AsyncOpenAI
) -> None:
    session = Session(token_budget=200)
    server.fail(400)
    with session, pytest.raises(openai.BadRequestError):
        send(client, max_tokens=120)
    gate = threading.Event()
    server.delay(gate)
    with session:
        task = asyncio.create_task(asend(aclient, max_tokens=120))
        await asyncio.to_thread(server.wait_for_chats, 2, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        send(client, max_tokens=120)

    assert session.usage.calls == 1


def test_each_of_several_answers_counts(client: OpenAI) -> None:
    with Session(token_budget=200) as session:
        with pytest.raises(TokenBudgetError):
            send(client, max_tokens=80, n=3)
        send(client, n=3)

    assert spent(session) <= 200


@pytest.mark.parametrize("server", [{"max_model_len": 300}], indirect=True)
def test_an_answer_without_a_limit_gets_what_budget_and_window_have_room_for(
    server: FakeServer, client: OpenAI
) -> None:
    with Session(token_budget=1000) as session:
        send(client)
        prompt = session.calls[0].prompt_tokens
        send(client, n=2, max_tokens=250)
        rest = 1000 - spent(session)
        assert rest > 300
        send(client, n=20)

    asked = [chat.body.get("max_completion_tokens") for chat in server.chats]
    assert asked == [300 - prompt, None, (rest - prompt) // 20]


async def test_tokens_are_counted_as_the_call_would_have_them(
    server: FakeServer, client: OpenAI, aclient: AsyncOpenAI
) -> None:
    tool = {"type": "function", "function": {"name": "lookup", "parameters": {}}}
    options: Any = {"tools": [tool], "extra_headers": {"x-tenant": "acme"}}
    with Session("s1", token_budget=1000) as session:
        client.chat.completions.with_raw_response.create(
            model="planner", messages=[SHORT], **options
        )
        await aclient.chat.completions.with_raw_response.create(
            model="planner", messages=[SHORT], **options
        )

    counted = [item for item in server.requests if item.path == "/tokenize"]
    assert [item.body["tools"] for item in counted] == [[tool]] * 2
    assert [(item.header("x-tenant"), item.sessions) for item in counted] == [("acme", ["s1"])] * 2
    assert [chat.body["max_completion_tokens"] for chat in server.chats] == [
        1000 - session.calls[0].prompt_tokens,
        1000 - spent(session) + session.calls[1].completion_tokens,
    ]


@pytest.mark.parametrize("status", [404, 500])
def test_a_server_that_cannot_count_is_still_called(
    status: int, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = OpenAI(base_url=server.url, api_key="local", max_retries=0)
    server.fail(status)
    with client, Session() as session:
        send(client, LONG, max_tokens=8)
        send(client, LONG, max_tokens=8)

    assert session.usage.calls == 2
    assert caplog.text.count("has no /tokenize") == (status == 404)


def test_what_openai_would_let_the_server_judge_is_judged_there(client: OpenAI) -> None:
    with Session(token_budget=100), pytest.raises(openai.BadRequestError):
        client.post("/chat/completions", body={"model": "planner"}, cast_to=object)


FOREIGN = [
    {"choices": [{"index": 0, "delta": None, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"id": "x"}]}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}]},
]


def test_chunks_that_other_servers_write_reach_the_caller() -> None:
    """Counting a stream may fail on them, and reading it may not."""
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in FOREIGN) + "data: [DONE]\n\n"
    kind = {"content-type": "text/event-stream"}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, headers=kind, text=text))
    with (
        OpenAI(
            base_url="http://other/v1", api_key="k", http_client=httpx.Client(transport=transport)
        ) as client,
        Session("s1", token_budget=500),
    ):
        read = list(send(client, stream=True, max_tokens=9))
        assert [chunk.choices[0].finish_reason for chunk in read] == [None, None, "stop"]
        send_again = list(send(client, stream=True, max_tokens=9))
    assert len(send_again) == 3
