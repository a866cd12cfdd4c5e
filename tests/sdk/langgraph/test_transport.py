"""How models and teams reach the server: the address, the key, the way by a proxy."""

import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI

from prefillshare_agents import OpenAI
from prefillshare_agents.langgraph import ChatPrefillShare, Team
from prefillshare_agents.testing import FakeServer


async def async_key() -> str:
    return "from-a-function"


KEYS: dict[str, Callable[[], Any]] = {
    "plain": lambda: "from-a-function",
    "async": async_key,
    "partial": functools.partial(async_key),
    "returns a coroutine": lambda: async_key(),
}
ASYNC = [name for name in KEYS if name != "plain"]

MODELS: dict[str, Callable[[str, Any], ChatPrefillShare]] = {
    "model": lambda url, key: ChatPrefillShare(model="critic", base_url=url, api_key=key),
    "team": lambda url, key: Team(url, ["critic"], api_key=key).model("critic"),
    "team's model": lambda url, key: Team(url, ["critic"]).model("critic", api_key=key),
    "model's field": lambda url, key: Team(url, ["critic"]).model("critic", openai_api_key=key),
}


Keep = Callable[[Any], Any]


@pytest.fixture
async def keep() -> AsyncIterator[Keep]:
    """Returns the model it is given, and closes its clients after the test."""
    models: list[Any] = []

    def kept(model: Any) -> Any:
        models.append(model)
        return model

    yield kept
    for model in models:
        await model.root_async_client.close()
        if model.root_client is not None:
            model.root_client.close()


def authorised(server: FakeServer) -> list[str | None]:
    return [dict(chat.headers).get("authorization") for chat in server.chats]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BASE_URL", "API_BASE", "API_KEY", "PROXY"):
        monkeypatch.delenv(f"OPENAI_{name}", raising=False)


@pytest.mark.parametrize("making", MODELS)
def test_a_plain_function_gives_the_key_of_synchronous_calls(
    making: str, keep: Keep, server: FakeServer
) -> None:
    model = keep(MODELS[making](server.url, KEYS["plain"]))
    model.invoke("hello")
    list(model.stream("hello"))

    assert authorised(server) == ["Bearer from-a-function"] * 2


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("making", MODELS)
async def test_any_function_gives_the_key_of_asynchronous_calls(
    making: str, kind: str, keep: Keep, server: FakeServer
) -> None:
    model = keep(MODELS[making](server.url, KEYS[kind]))
    await model.ainvoke("hello")
    assert [part async for part in model.astream("hello")]

    assert authorised(server) == ["Bearer from-a-function"] * 2


@pytest.mark.parametrize("kind", ASYNC)
@pytest.mark.parametrize("making", MODELS)
def test_a_synchronous_call_refuses_an_async_key(
    making: str, kind: str, keep: Keep, server: FakeServer
) -> None:
    model = keep(MODELS[making](server.url, KEYS[kind]))
    calls: list[Callable[[str], Any]] = [model.invoke, model.get_num_tokens]
    for call in calls:
        with pytest.raises(ValueError, match=r"api_key is the async function.*ainvoke"):
            call("hello")

    assert server.chats == []


async def test_a_key_is_asked_for_with_each_request(keep: Keep, server: FakeServer) -> None:
    asked: list[str] = []

    def next_key() -> str:
        asked.append(f"key-{len(asked)}")
        return asked[-1]

    model = keep(ChatPrefillShare(model="critic", base_url=server.url, api_key=next_key))
    model.invoke("hello")
    await model.ainvoke("hello")

    assert authorised(server) == ["Bearer key-0", "Bearer key-1"]


def test_a_model_without_an_address_is_refused() -> None:
    with pytest.raises(ValueError, match=r"base_url is not given.*api\.openai\.com.*base_url="):
        ChatPrefillShare(model="critic")


@pytest.mark.parametrize("name", ["OPENAI_API_BASE", "OPENAI_BASE_URL"])
def test_the_environment_gives_the_address(
    name: str, keep: Keep, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, server.url)
    keep(ChatPrefillShare(model="critic")).invoke("hello")

    assert len(server.chats) == 1


async def test_beside_a_given_client_the_other_one_is_on_its_server(
    keep: Keep, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    with OpenAI(base_url=server.url, api_key="local") as client:
        model = keep(ChatPrefillShare(model="critic", client=client.chat.completions))
        await model.ainvoke("hello")

    assert len(server.chats) == 1


def test_only_the_given_client_may_know_the_address() -> None:
    with pytest.raises(ValueError, match="base_url"):
        ChatPrefillShare(model="critic", client=object())


# The proxy is a fake server: it is asked for a host that nobody else would answer for.
ELSEWHERE = "http://prefillshare.invalid/v1"

PROXIED: dict[str, Callable[..., Any]] = {
    "ChatOpenAI, to compare with": lambda **proxy: ChatOpenAI(
        model="critic",
        base_url=ELSEWHERE,
        api_key="local",  # type: ignore[arg-type]
        **proxy,
    ),
    "model": lambda **proxy: ChatPrefillShare(model="critic", base_url=ELSEWHERE, **proxy),
    "team": lambda **proxy: Team(ELSEWHERE, ["critic"]).model("critic", **proxy),
}


@pytest.mark.parametrize("by", ["field", "environment"])
@pytest.mark.parametrize("making", PROXIED)
async def test_calls_go_by_the_proxy(
    making: str, by: str, keep: Keep, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = server.url.removesuffix("/v1")
    if by == "environment":
        monkeypatch.setenv("OPENAI_PROXY", proxy)
    model = keep(PROXIED[making](**{"openai_proxy": proxy} if by == "field" else {}))
    model.invoke("hello")
    await model.ainvoke("hello")

    hosts = [dict(chat.headers).get("host") for chat in server.chats]
    assert hosts == ["prefillshare.invalid"] * 2


@pytest.mark.parametrize("name", ["http_client", "http_async_client"])
def test_a_proxy_beside_a_transport_is_refused(name: str) -> None:
    transport = {
        "http_client": openai.DefaultHttpxClient(),
        "http_async_client": openai.DefaultAsyncHttpxClient(),
    }[name]
    options: Any = {"openai_proxy": "http://user:secret@127.0.0.1:9", name: transport}
    told = r"openai_proxy.*http_client= or http_async_client="
    with pytest.raises(ValueError, match=told) as of_model:
        ChatPrefillShare(model="critic", base_url=ELSEWHERE, **options)
    with pytest.raises(ValueError, match=told):
        Team(ELSEWHERE, ["critic"]).model("critic", **options)

    assert "secret" not in of_model.value.errors()[0]["msg"]  # type: ignore[attr-defined]


def test_socket_options_are_refused_and_not_ignored() -> None:
    with pytest.raises(ValueError, match=r"http_socket_options is \[\(6, 18, 1\)\]; give http_cl"):
        ChatPrefillShare(model="critic", base_url=ELSEWHERE, http_socket_options=[(6, 18, 1)])
