"""A call that cannot fit is refused before it is sent, with the figures."""

import socket
import threading
import time
from typing import Any

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


def paths(server: FakeServer) -> list[str]:
    return [request.path for request in server.requests]


def test_a_short_call_is_sent_without_being_counted() -> None:
    with FakeServer() as server:
        session = Session(base_url=server.url, messages=[SHORT])
        session.chat("planner", max_tokens=16)

        assert paths(server) == ["/v1/chat/completions"]
        session.close()


def test_a_call_over_the_servers_window_is_not_sent() -> None:
    with FakeServer(max_model_len=800) as server:
        session = Session(base_url=server.url, messages=[LONG])
        with pytest.raises(ContextWindowError, match=r"9\d\d prompt tokens .* 64 more.* 800: "):
            session.chat("planner", max_tokens=64)

        assert paths(server) == ["/tokenize"]
        assert session.messages == (LONG,)
        session.close()


def test_a_long_call_that_fits_is_counted_and_sent() -> None:
    with FakeServer(max_model_len=2000) as server:
        session = Session(base_url=server.url, messages=[LONG])
        session.chat("planner")

        assert paths(server) == ["/tokenize", "/v1/chat/completions"]
        session.close()


def test_once_the_window_is_known_only_what_may_exceed_it_is_counted() -> None:
    with FakeServer(max_model_len=30_000) as server:
        session = Session(base_url=server.url, messages=[LONG])
        session.chat("planner")
        session.chat("critic")

        assert paths(server).count("/tokenize") == 1
        session.close()


def test_a_smaller_window_can_be_given(server: FakeServer) -> None:
    session = Session(base_url=server.url, messages=[LONG], context_window=500)
    with pytest.raises(ContextWindowError, match="the context window is 500"):
        session.chat("planner")
    session.close()


def test_without_a_window_the_server_judges() -> None:
    with FakeServer(max_model_len=800) as server:
        session = Session(base_url=server.url, messages=[LONG], context_window=None)
        with pytest.raises(openai.BadRequestError, match="800"):
            session.chat("planner")

        assert paths(server) == ["/v1/chat/completions"]
        session.close()


def test_a_budget_ends_before_the_call_that_would_exceed_it(server: FakeServer) -> None:
    session = Session(base_url=server.url, messages=[SHORT], token_budget=60)
    session.chat("planner", max_tokens=8)
    spent = session.usage.prompt_tokens + session.usage.completion_tokens
    with pytest.raises(TokenBudgetError, match=rf"{spent} are spent .* token_budget is 60"):
        session.chat("critic", max_tokens=60)

    assert len(server.chats) == 1
    assert session.usage.calls == 1
    session.close()


def test_what_is_within_the_budget_by_the_servers_count_is_sent(server: FakeServer) -> None:
    session = Session(base_url=server.url, messages=[LONG], token_budget=1200)
    session.chat("planner", max_tokens=8)

    assert session.usage.calls == 1
    session.close()


def test_calls_at_once_do_not_exceed_the_budget_together(server: FakeServer) -> None:
    session = Session(base_url=server.url, messages=[SHORT], token_budget=100)
    gate = threading.Event()
    server.delay(gate)
    refused: list[TokenBudgetError] = []

    def work() -> None:
        try:
            session.chat("planner", max_tokens=40)
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
    session.close()

    assert refused
    assert session.usage.prompt_tokens + session.usage.completion_tokens <= 100


def test_an_answer_without_a_limit_of_its_own_gets_what_is_left(server: FakeServer) -> None:
    session = Session(base_url=server.url, messages=[SHORT], token_budget=100)
    session.chat("planner")
    session.close()

    prompt = session.calls[0].prompt_tokens
    assert server.chats[0].body["max_completion_tokens"] == 100 - prompt


def test_a_fork_spends_from_the_same_budget(server: FakeServer) -> None:
    session = Session(base_url=server.url, messages=[SHORT], token_budget=60)
    branch = session.fork()
    branch.chat("planner", max_tokens=8)
    with pytest.raises(TokenBudgetError):
        session.chat("planner", max_tokens=50)
    session.merge(branch)
    session.close()

    assert session.usage.calls == 1


@pytest.mark.parametrize("how", ["fails", "is closed"])
def test_what_a_call_did_not_use_is_free_again(how: str, server: FakeServer) -> None:
    session = Session(base_url=server.url, messages=[SHORT], token_budget=200)
    if how == "fails":
        server.fail(400)
        with pytest.raises(openai.BadRequestError):
            session.chat("planner", max_tokens=120)
    else:
        session.chat("planner", max_tokens=120, stream=True).close()
    session.chat("planner", max_tokens=120)
    session.close()


@pytest.mark.parametrize("status", [404, 500])
def test_a_server_that_cannot_count_is_still_called(
    status: int, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(base_url=server.url, messages=[LONG])
    server.fail(status)
    session.chat("planner", max_tokens=8)
    session.chat("planner", max_tokens=8)
    session.close()

    assert session.usage.calls == 2
    assert caplog.text.count("has no /tokenize") == (status == 404)


async def test_counting_adds_no_retries_to_those_of_the_call(server: FakeServer) -> None:
    server.fail(*[503] * 20)
    with (
        OpenAI(base_url=server.url, api_key="local") as client,
        pytest.raises(openai.InternalServerError),
    ):
        Session(client=client, messages=[LONG]).chat("planner")
    assert paths(server) == ["/tokenize"] + ["/v1/chat/completions"] * 3
    async with AsyncOpenAI(base_url=server.url, api_key="local") as aclient:
        with pytest.raises(openai.InternalServerError):
            await AsyncSession(client=aclient, messages=[LONG]).chat("planner")
    assert paths(server)[4:] == ["/tokenize"] + ["/v1/chat/completions"] * 3


async def test_a_calls_timeout_is_that_of_its_counting_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        options: Any = {"base_url": url, "api_key": "local", "max_retries": 0}
        started = time.monotonic()
        with OpenAI(**options) as client, pytest.raises(openai.APITimeoutError):
            Session(client=client, messages=[LONG]).chat("planner", timeout=0.3)
        async with AsyncOpenAI(**options) as aclient:
            twin = AsyncSession(client=aclient, messages=[LONG])
            with pytest.raises(openai.APITimeoutError):
                await twin.chat("planner", timeout=0.3)
    # openai's own is ten minutes.
    assert time.monotonic() - started < 240


def test_a_stream_that_is_dropped_gives_its_tokens_back(server: FakeServer) -> None:
    with OpenAI(base_url=server.url, api_key="local") as client:
        session = Session(client=client, messages=[SHORT], token_budget=150)
        stream = session.chat("planner", max_tokens=100, stream=True)
        next(stream)
        del stream
        session.chat("planner", max_tokens=100)


async def test_an_async_stream_that_is_dropped_gives_its_tokens_back(server: FakeServer) -> None:
    async with AsyncOpenAI(base_url=server.url, api_key="local") as client:
        session = AsyncSession(client=client, messages=[SHORT], token_budget=150)
        stream = await session.chat("planner", max_tokens=100, stream=True)
        response = stream._source.response  # Kept: only the stream is dropped.
        del stream
        await session.chat("planner", max_tokens=100)
        await response.aclose()


def test_tokens_are_counted_as_the_call_would_have_them(server: FakeServer) -> None:
    session = Session(base_url=server.url, messages=[SHORT])
    tool = {"type": "function", "function": {"name": "lookup", "parameters": {}}}
    counted = session.count_tokens("planner", instructions="Plan.", tools=[tool])
    session.chat("planner", instructions="Plan.", tools=[tool])

    assert counted == session.calls[0].prompt_tokens > session.count_tokens("planner")
    session.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"token_budget": 0}, "token_budget is 0"),
        ({"context_window": 0}, "context_window is 0"),
        ({"context_window": "large"}, "context_window is 'large'"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(options: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Session(**options)


async def test_the_async_session_has_the_same_limits() -> None:
    with FakeServer(max_model_len=800) as server:
        session = AsyncSession(base_url=server.url, messages=[LONG])
        with pytest.raises(ContextWindowError):
            await session.chat("planner")
        poor = AsyncSession(
            base_url=server.url, messages=[LONG], token_budget=5, context_window=None
        )
        with pytest.raises(TokenBudgetError):
            await poor.chat("planner")

        assert await session.count_tokens("planner") > 900
        await session.close()
        await poor.close()
