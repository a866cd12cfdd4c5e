"""One owner of retries: three requests where the client and the graph would both retry."""

from collections.abc import Callable
from typing import Any

import openai
import pytest
from langchain_core.runnables import RunnablePassthrough
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import RetryPolicy

from prefillshare_agents import AsyncOpenAI, OpenAI
from prefillshare_agents.langgraph import ChatPrefillShare, Team, worth_retrying
from prefillshare_agents.testing import FakeServer

TASK: Any = {"messages": [("user", "How far is the moon?")]}
AT_ONCE = {"initial_interval": 0.0, "jitter": False}


def graph(node: Any, **policy: Any) -> Any:
    built = StateGraph(MessagesState)
    retries: Any = RetryPolicy(max_attempts=3, **{**AT_ONCE, **policy})
    built.add_node("critic", node, retry_policy=retries)
    built.add_edge(START, "critic")
    return built.compile()


@pytest.mark.parametrize(("client_retries", "requests"), [(2, 3), (1, 2), (0, 3)])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_503_is_tried_three_times_at_most(
    client_retries: int, requests: int, streamed: bool, server: FakeServer
) -> None:
    team = Team(server.url, ["critic"], max_retries=client_retries)
    app = graph(team.node("critic", streaming=streamed))
    server.script(lambda request: 503)
    with pytest.raises(openai.InternalServerError, match="a scripted failure"):
        app.invoke(TASK)
    assert len(server.chats) == requests
    with pytest.raises(openai.InternalServerError, match="a scripted failure"):
        await app.ainvoke(TASK)
    assert len(server.chats) == 2 * requests
    await team.aclose()


HELLO: Any = [{"role": "user", "content": "hello"}]
ASK: Any = {"model": "critic", "messages": HELLO}


def plain(kind: str, url: str, retries: int) -> Callable[[Any], Any]:
    """A node that calls what is no chat model: `OpenAI`, `Session` and their twins."""
    options: Any = {"base_url": url, "api_key": "local", "max_retries": retries}
    if kind.startswith("Async"):

        async def acall(_: Any) -> Any:
            async with AsyncOpenAI(**options) as aclient:
                if kind == "AsyncOpenAI":
                    return await aclient.chat.completions.create(**ASK)
                return await aclient.session(messages=HELLO).chat("critic")

        return acall
    client = OpenAI(**options)
    if kind == "OpenAI":
        return lambda _: client.chat.completions.create(**ASK)
    return lambda _: client.session(messages=HELLO).chat("critic")


@pytest.mark.parametrize("policy", [{}, {"retry_on": worth_retrying}])
@pytest.mark.parametrize(("client_retries", "requests"), [(2, 3), (0, 3)])
@pytest.mark.parametrize("kind", ["OpenAI", "AsyncOpenAI", "Session", "AsyncSession"])
async def test_a_plain_clients_503_in_a_node_is_tried_three_times_at_most(
    kind: str, client_retries: int, requests: int, policy: Any, server: FakeServer
) -> None:
    server.script(lambda request: 503)
    app = graph(plain(kind, server.url, client_retries), **policy)
    with pytest.raises(openai.InternalServerError, match="a scripted failure") as caught:
        await app.ainvoke(TASK)

    assert len(server.chats) == requests
    assert type(caught.value).__name__ == "InternalServerError"


@pytest.mark.parametrize("kind", ["OpenAI", "Session"])
def test_an_error_outside_a_node_stays_openais_own(kind: str, server: FakeServer) -> None:
    server.script(lambda request: 503)
    with pytest.raises(openai.InternalServerError) as caught:
        plain(kind, server.url, 1)(TASK)

    assert not isinstance(caught.value, RuntimeError)


def test_the_predicate_lets_the_policy_retry_what_no_client_has_retried(
    server: FakeServer,
) -> None:
    team = Team(server.url, ["critic"], max_retries=0)
    server.fail(503, 503)
    graph(team.node("critic"), retry_on=worth_retrying).invoke(TASK)
    team.close()

    assert len(server.chats) == 3


@pytest.mark.parametrize("client_retries", [0, 2])
def test_the_predicate_retries_no_refusal(client_retries: int, server: FakeServer) -> None:
    team = Team(server.url, ["critic"], max_retries=client_retries)
    server.fail(400)
    with pytest.raises(openai.BadRequestError):
        graph(team.node("critic"), retry_on=worth_retrying).invoke(TASK)
    team.close()

    assert len(server.chats) == 1


def test_the_error_stays_what_it_was(server: FakeServer) -> None:
    model = ChatPrefillShare(model="critic", base_url=server.url, max_retries=1)
    server.fail(429, 429)
    with pytest.raises(openai.RateLimitError) as caught:
        model.invoke("hello")

    assert isinstance(caught.value, RuntimeError)
    assert type(caught.value).__name__ == "OpenAIRateLimitError"
    assert caught.value.status_code == 429
    assert "a scripted failure" in str(caught.value)
    assert not worth_retrying(caught.value)


SCHEMA: Any = {"title": "Verdict", "type": "object", "properties": {}}
RETRIED: dict[str, Callable[..., Any]] = {
    "model": lambda model, **retry: model.with_retry(**retry),
    "bind": lambda model, **retry: model.bind(temperature=0).with_retry(**retry),
    "bind_tools": lambda model, **retry: model.bind_tools([]).with_retry(**retry),
    "with_config": lambda model, **retry: model.with_config(tags=["x"]).with_retry(**retry),
    "structured": lambda model, **retry: model.with_structured_output(SCHEMA).with_retry(**retry),
    "raw": lambda model, **retry: model.with_structured_output(SCHEMA, include_raw=True).with_retry(
        **retry
    ),
    "in a chain": lambda model, **retry: RunnablePassthrough() | model.with_retry(**retry),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("retrying", RETRIED)
async def test_with_retry_owns_the_retries(
    retrying: str, asynchronous: bool, server: FakeServer
) -> None:
    model = ChatPrefillShare(model="critic", base_url=server.url)
    retried = RETRIED[retrying](model, stop_after_attempt=2, wait_exponential_jitter=False)
    for failure, kind, requests in [
        (503, openai.InternalServerError, 2),
        (404, openai.NotFoundError, 1),
    ]:
        before = len(server.chats)
        server.script(lambda request, failure=failure: failure)
        with pytest.raises(kind):
            await retried.ainvoke("hello") if asynchronous else retried.invoke("hello")
        assert len(server.chats) - before == requests
        with pytest.raises(kind):
            await retried.abatch(["hello"]) if asynchronous else retried.batch(["hello"])
        assert len(server.chats) - before == 2 * requests
    await model.root_async_client.close()


def test_a_node_does_not_retry_what_with_retry_has_retried(server: FakeServer) -> None:
    model: Any = ChatPrefillShare(model="critic", base_url=server.url)
    retried = model.with_retry(stop_after_attempt=2, wait_exponential_jitter=False)
    server.script(lambda request: 503)
    with pytest.raises(openai.InternalServerError):
        graph(lambda state: {"messages": [retried.invoke(state["messages"])]}).invoke(TASK)

    assert len(server.chats) == 2


def test_an_answer_that_does_not_parse_is_tried_again(server: FakeServer) -> None:
    model: Any = ChatPrefillShare(model="critic", base_url=server.url)
    server.script(["no JSON", "{}"])
    retried = model.with_structured_output(SCHEMA).with_retry(wait_exponential_jitter=False)

    assert retried.invoke("hello") == {}
    assert len(server.chats) == 2


def test_a_stream_of_with_retry_has_the_clients_retries(server: FakeServer) -> None:
    model: Any = ChatPrefillShare(model="critic", base_url=server.url)
    server.fail(503, 503)
    list(model.with_retry().stream("hello"))

    assert len(server.chats) == 3


@pytest.mark.parametrize(
    ("client_retries", "options"), [(0, {}), (2, {"retry_if_exception_type": worth_retrying})]
)
def test_a_chains_retries_have_one_owner_if_they_are_told(
    client_retries: int, options: Any, server: FakeServer
) -> None:
    model: Any = ChatPrefillShare(model="critic", base_url=server.url, max_retries=client_retries)
    chain = (RunnablePassthrough() | model).with_retry(wait_exponential_jitter=False, **options)
    server.script(lambda request: 503)
    with pytest.raises(openai.InternalServerError):
        chain.invoke("hello")

    assert len(server.chats) == 3


def test_a_stream_that_broke_off_is_retried_by_the_policy(server: FakeServer) -> None:
    team = Team(server.url, ["critic"])
    server.cut_stream(after=1)
    answer = graph(team.node("critic", streaming=True)).invoke(TASK)["messages"][-1]
    team.close()

    assert len(server.chats) == 2
    assert answer.text
