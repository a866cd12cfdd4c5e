"""Who gave which answer stays known, in the program and in the prompt."""

from collections.abc import Iterator
from typing import Any

import pytest

from prefillshare_agents import AsyncSession, Session
from prefillshare_agents.testing import FakeServer

TASK: Any = {"role": "user", "content": "How far is the moon?"}


@pytest.fixture
def session(server: FakeServer) -> Iterator[Session]:
    made = Session(base_url=server.url, messages=[TASK])
    yield made
    made.close()


def names(chat: Any) -> list[Any]:
    return [item.get("name") for item in chat.body["messages"] if item["role"] == "assistant"]


def test_each_answer_in_the_context_names_its_role(session: Session) -> None:
    session.chat("planner")
    session.chat("critic")

    assert [message.get("name") for message in session.messages] == [None, "planner", "critic"]


def test_another_role_is_told_who_answered(session: Session, server: FakeServer) -> None:
    session.chat("planner")
    session.chat("critic")
    session.chat("planner")

    assert [names(chat) for chat in server.chats] == [[], ["planner"], ["planner", "critic"]]
    assert "Assistant messages so far: 1 planner, 2 critic." in server.rendered(2)


def test_a_role_that_is_alone_is_told_nothing(session: Session, server: FakeServer) -> None:
    session.chat("planner")
    session.chat("planner")

    assert names(server.chats[1]) == [None]
    assert "Assistant messages" not in server.rendered(1)


def test_telling_the_speakers_moves_nothing_that_is_shared(
    session: Session, server: FakeServer
) -> None:
    for role in ("planner", "critic", "planner", "solver"):
        session.chat(role)

    server.assert_shared(1.0)


def test_roles_that_were_trained_without_can_go_without(server: FakeServer) -> None:
    session = Session(base_url=server.url, messages=[TASK], speakers=False)
    session.chat("planner")
    session.chat("critic")
    session.close()

    assert names(server.chats[1]) == [None]
    assert session.messages[1]["name"] == "planner"


async def test_the_async_session_tells_the_same(server: FakeServer) -> None:
    session = AsyncSession(base_url=server.url, messages=[TASK])
    await session.chat("planner")
    await session.chat("critic")
    await session.close()

    assert names(server.chats[1]) == ["planner"]
