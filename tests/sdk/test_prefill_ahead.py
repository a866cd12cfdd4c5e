"""What is appended can be prefilled before a role is called."""

import logging
from typing import Any

import openai
import pytest

from prefillshare_agents import AsyncSession, Session
from prefillshare_agents._core import HINT
from prefillshare_agents.testing import FakeServer

TASK: Any = {"role": "user", "content": "How far is the moon?"}
MORE: Any = {"role": "user", "content": "And the sun?"}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the fake server may take longer than a prefill ahead is worth."""
    monkeypatch.setitem(HINT, "timeout", 60.0)


def prefills(server: FakeServer) -> list[Any]:
    return [item for item in server.requests if item.path.endswith("/prefill")]


def test_an_appended_message_is_prefilled_when_the_next_role_is_called(server: FakeServer) -> None:
    session = Session("s", base_url=server.url, messages=[TASK], speakers=False)
    session.chat("planner")
    session.append(MORE, prefill=True)
    session.chat("critic")
    session.close()

    [asked] = prefills(server)
    assert asked.path == "/v1/sessions/s/prefill"
    assert [item["content"] for item in asked.body["messages"]][-1] == MORE["content"]
    assert session.calls[1].computed_tokens < 5  # the answer's opening


def test_only_what_is_wanted_is_prefilled_ahead(server: FakeServer) -> None:
    lazy = Session(base_url=server.url, messages=[TASK])
    lazy.append(MORE)
    eager = Session(base_url=server.url, messages=[TASK], prefill=True)
    eager.append(MORE)
    eager.append(MORE, prefill=False)
    lazy.close()
    eager.close()

    assert len(prefills(server)) == 1


def test_a_prefill_that_is_waited_for_tells_its_counts(server: FakeServer) -> None:
    session = Session(base_url=server.url, messages=[TASK])
    first = session.prefill(wait=True)
    again = session.prefill(wait=True)
    session.close()

    assert first.computed_tokens == first.prompt_tokens
    assert again.computed_tokens == 1  # the last token always is


def test_a_prefill_that_fails_leaves_a_log_message_and_the_next_call(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session("s", base_url=server.url)
    server.fail(400)
    with caplog.at_level(logging.WARNING):
        session.append(TASK, prefill=True)
    session.chat("planner")
    session.close()

    assert "'s': prefill ahead failed" in caplog.text
    assert session.usage.calls == 1


def test_a_prefill_that_was_asked_for_by_name_raises(server: FakeServer) -> None:
    session = Session(base_url=server.url)
    with pytest.raises(ValueError, match="empty"):
        session.prefill()
    session.append(TASK)
    server.fail(400)
    with pytest.raises(openai.BadRequestError):
        session.prefill()
    session.close()


def test_without_a_client_nothing_is_prefilled_and_nothing_added() -> None:
    session = Session()
    with pytest.raises(RuntimeError, match="base_url="):
        session.append(TASK, prefill=True)
    assert session.messages == ()


def test_a_prefill_ahead_is_tried_once(server: FakeServer) -> None:
    session = Session(base_url=server.url)
    server.fail(503)
    session.append(TASK, prefill=True)
    session.close()

    assert len(prefills(server)) == 1


def test_isolated_roles_have_nothing_to_prefill_ahead(server: FakeServer) -> None:
    session = Session(base_url=server.url, mode="isolate", prefill=True)
    session.append(TASK)
    session.close()

    assert prefills(server) == []


def test_nothing_behind_an_open_tool_call_is_prefilled(server: FakeServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    session = Session(base_url=server.url, messages=[TASK, asked])
    session.append({"role": "assistant", "content": "Another role."}, prefill=True)
    session.append({"role": "tool", "tool_call_id": "c1", "content": "1"}, prefill=True)
    session.close()

    assert [len(item.body["messages"]) for item in prefills(server)] == [1, 4]


async def test_an_async_append_does_not_wait_and_the_next_call_comes_after_it(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    session = AsyncSession("s", base_url=server.url, messages=[TASK])
    session.append(MORE, prefill=True)
    assert server.requests == []
    await session.chat("critic")
    assert [item.path.rsplit("/", 1)[1] for item in server.requests] == ["prefill", "completions"]

    server.fail(400)
    session.append(MORE, prefill=True)
    await session.close()
    assert "prefill ahead failed" in caplog.text


async def test_an_async_append_without_a_client_raises_at_once() -> None:
    session = AsyncSession()
    with pytest.raises(RuntimeError, match="base_url="):
        session.append(TASK, prefill=True)
    assert session.messages == ()


async def test_an_async_prefill_sends_what_was_there_when_it_was_asked_for(
    server: FakeServer,
) -> None:
    session = AsyncSession(base_url=server.url)
    place = session.checkpoint()
    session.append(TASK, prefill=True)
    session.restore(place)
    await session.close()

    assert [item.body["messages"] for item in prefills(server)] == [[TASK]]


@pytest.mark.parametrize("kind", [Session, AsyncSession])
async def test_a_context_that_begins_with_an_open_tool_call_is_not_prefilled_but_logged(
    kind: type[Session] | type[AsyncSession], server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    session = kind("s", base_url=server.url)
    session.append(asked, prefill=True)
    ended = session.close()
    if ended is not None:
        await ended

    assert session.messages == (asked,)
    assert prefills(server) == []
    assert "'s': prefill ahead failed: the context is empty" in caplog.text


def test_outside_a_coroutine_the_error_says_what_to_do(server: FakeServer) -> None:
    session = AsyncSession(base_url=server.url, prefill=True)
    with pytest.raises(RuntimeError, match="Append in a coroutine, or with prefill=False"):
        session.append(TASK)

    assert len(session.messages) == 0
    session.append(TASK, prefill=False)
    assert len(session.messages) == 1
