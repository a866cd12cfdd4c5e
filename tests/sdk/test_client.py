"""Which session header a request of `OpenAI` and `AsyncOpenAI` carries."""

import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from prefillshare_agents import AsyncOpenAI, OpenAI, Session, current_session
from prefillshare_agents.testing import FakeServer

HELLO: Any = [{"role": "user", "content": "hello"}]
Make = Callable[..., OpenAI]


@pytest.fixture
def make(server: FakeServer) -> Iterator[Make]:
    made: list[OpenAI] = []

    def client(**options: Any) -> OpenAI:
        made.append(OpenAI(base_url=server.url, api_key="local", **options))
        return made[-1]

    yield client
    for item in made:
        item.close()


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="planner", messages=HELLO, **options)


def test_a_request_carries_the_clients_session(make: Make, server: FakeServer) -> None:
    ask(make(session="order-4711"))

    assert server.chats[0].sessions == ["order-4711"]


def test_a_session_object_stands_for_its_id(make: Make, server: FakeServer) -> None:
    session = Session()
    ask(make(session=session))

    assert server.chats[0].sessions == [session.id]


def test_without_a_session_no_header_is_made_up(make: Make, server: FakeServer) -> None:
    ask(make())

    assert server.chats[0].sessions == []


def test_a_with_block_gives_its_session_to_the_calls_inside(make: Make, server: FakeServer) -> None:
    client = make()
    with Session("outer"):
        ask(client)
        with Session("inner"):
            ask(client)
        ask(client)
    ask(client)

    assert [chat.sessions for chat in server.chats] == [["outer"], ["inner"], ["outer"], []]


def test_a_client_opens_sessions_for_a_block(make: Make, server: FakeServer) -> None:
    client = make()
    with client.session("block") as session:
        ask(client)
    session.append(HELLO[0])
    session.chat("critic")

    assert [chat.sessions for chat in server.chats] == [["block"], ["block"]]


async def test_an_async_client_opens_sessions_for_a_block(server: FakeServer) -> None:
    async with AsyncOpenAI(base_url=server.url, api_key="local") as client:
        async with client.session("block", messages=HELLO) as session:
            await client.chat.completions.create(model="planner", messages=HELLO)
        await session.chat("critic")

    assert [chat.sessions for chat in server.chats] == [["block"], ["block"]]


def test_the_clients_session_comes_before_the_with_block(make: Make, server: FakeServer) -> None:
    with Session("block"):
        ask(make(session="client"))

    assert server.chats[0].sessions == ["client"]


@pytest.mark.parametrize("header", ["X-Session-ID", "x-session-id", "X-SESSION-ID"])
def test_a_header_of_the_request_comes_first_in_any_case(
    header: str, make: Make, server: FakeServer
) -> None:
    ask(make(session="client"), extra_headers={header: "explicit"})

    assert server.chats[0].sessions == ["explicit"]


@pytest.mark.parametrize("header", ["X-PrefillShare-Session", "x-session-affinity"])
def test_another_spelling_of_the_header_is_not_overruled(
    header: str, make: Make, server: FakeServer
) -> None:
    ask(make(session="client"), extra_headers={header: "explicit"})

    assert server.chats[0].sessions == []
    assert (header.lower(), "explicit") in server.chats[0].headers


def test_a_default_header_of_the_client_is_not_overruled(make: Make, server: FakeServer) -> None:
    with Session("block"):
        ask(make(default_headers={"x-session-id": "explicit"}))

    assert server.chats[0].sessions == ["explicit"]


def test_a_header_from_the_environment_is_not_overruled(
    make: Make, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Session-Id: explicit")
    with Session("block"):
        ask(make())

    assert server.chats[0].sessions == ["explicit"]


def test_a_session_in_the_body_is_not_overruled(make: Make, server: FakeServer) -> None:
    ask(make(session="client"), extra_body={"session_id": "explicit"})

    assert server.chats[0].sessions == []
    assert server.chats[0].body["session_id"] == "explicit"


def test_omit_sends_a_request_outside_the_session(make: Make, server: FakeServer) -> None:
    ask(make(session="client"), extra_headers={"x-session-id": openai.Omit()})

    assert server.chats[0].sessions == []


def test_the_callers_header_mapping_is_left_alone(make: Make) -> None:
    headers = {"X-Trace": "1"}
    ask(make(session="client"), extra_headers=headers)

    assert headers == {"X-Trace": "1"}


@pytest.mark.parametrize("derive", ["copy", "with_options"])
def test_derived_clients_keep_the_session(derive: str, make: Make, server: FakeServer) -> None:
    client = make(session="client")
    ask(getattr(client, derive)(timeout=60))
    ask(getattr(client, derive)(session="other"))
    ask(getattr(client, derive)(session=None))

    assert [chat.sessions for chat in server.chats] == [["client"], ["other"], []]


def test_each_retry_carries_the_header_once(make: Make, server: FakeServer) -> None:
    server.fail(503, 503)
    ask(make(session="client", max_retries=2))

    assert [chat.sessions for chat in server.chats] == [["client"]] * 3


def test_every_surface_of_the_client_is_tagged(make: Make, server: FakeServer) -> None:
    class Reply(BaseModel):
        answer: int

    client = make(session="client")
    completions = client.chat.completions
    list(ask(client, stream=True))
    completions.with_raw_response.create(model="planner", messages=HELLO)
    with completions.with_streaming_response.create(model="planner", messages=HELLO) as raw:
        raw.read()
    with completions.stream(model="planner", messages=HELLO) as stream:
        stream.until_done()
    server.script(['{"answer": 4}'])
    parsed = completions.parse(model="planner", messages=HELLO, response_format=Reply)

    assert parsed.choices[0].message.parsed == Reply(answer=4)
    assert [chat.sessions for chat in server.chats] == [["client"]] * 5


def test_the_servers_account_is_in_the_responses_extra_fields(make: Make) -> None:
    client = make(session="client")
    answer = ask(client)
    chunks = list(ask(client, stream=True))

    assert answer.model_extra["prefillshare"]["affinity"] == "new"
    assert chunks[-1].model_extra["prefillshare"]["affinity"] == "hit"


def test_the_clients_are_openais_own_classes() -> None:
    assert issubclass(OpenAI, openai.OpenAI)
    assert issubclass(AsyncOpenAI, openai.AsyncOpenAI)


async def test_the_async_client_follows_the_same_rules(server: FakeServer) -> None:
    async with AsyncOpenAI(base_url=server.url, api_key="local") as client:
        create = client.chat.completions.create
        await create(model="planner", messages=HELLO)
        with Session("block"):
            await create(model="planner", messages=HELLO)
            await create(
                model="planner", messages=HELLO, extra_headers={"x-session-id": "explicit"}
            )
        fixed = client.with_options(session="client").with_options(max_retries=0)
        async for _ in await fixed.chat.completions.create(
            model="planner", messages=HELLO, stream=True
        ):
            pass

    assert [chat.sessions for chat in server.chats] == [[], ["block"], ["explicit"], ["client"]]


def test_threads_do_not_see_each_others_session(make: Make, server: FakeServer) -> None:
    client = make()
    barrier = threading.Barrier(8)

    def work(name: str) -> None:
        with Session(name):
            barrier.wait(timeout=60)
            client.chat.completions.create(
                model="planner", messages=[{"role": "user", "content": name}]
            )

    threads = [threading.Thread(target=work, args=(f"s{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(server.chats) == 8
    for chat in server.chats:
        assert chat.sessions == [chat.body["messages"][0]["content"]]


def test_a_copied_context_carries_the_session_into_a_thread() -> None:
    seen: list[object] = []
    session = Session()
    with session:
        context = copy_context()
    thread = threading.Thread(target=context.run, args=(lambda: seen.append(current_session()),))
    thread.start()
    thread.join()

    assert seen == [session]
    assert current_session() is None


def test_blocks_that_are_not_nested_leave_nothing_behind(make: Make, server: FakeServer) -> None:
    client = make()

    def steps(name: str) -> Iterator[None]:
        with client.session(name):
            yield
            ask(client)

    alice, bob = steps("alice"), steps("bob")
    next(alice)
    next(bob)
    list(alice)
    list(bob)
    ask(client)

    assert server.chats[-1].sessions == []
    assert current_session() is None


def test_a_block_that_ends_in_another_context_hides_no_error(make: Make) -> None:
    block = make().session("s")

    seen: list[BaseException] = []

    def work() -> None:
        try:
            try:
                raise KeyError("mine")
            finally:
                block.__exit__()
        except BaseException as error:
            seen.append(error)

    block.__enter__()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    block.__exit__()

    assert [type(error) for error in seen] == [KeyError]

    assert current_session() is None


def test_something_else_as_session_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="session is 5"):
        make(session=5)
    monkeypatch.setenv("PREFILLSHARE_SESSION", "käse")
    with pytest.raises(ValueError, match="PREFILLSHARE_SESSION in the environment"):
        ask(make())


@pytest.mark.parametrize("bad", ["", "a" * 256, "naïve", "line\nbreak", " padded "])
def test_an_id_that_no_header_can_carry_is_refused(bad: str, make: Make) -> None:
    with pytest.raises(ValueError, match="session id"):
        make(session=bad)
    with pytest.raises(ValueError, match="session id"):
        Session(bad)
