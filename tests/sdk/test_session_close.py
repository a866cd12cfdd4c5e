"""Ending a session: on the server, and at the client."""

from typing import Any

import openai
import pytest

from prefillshare_agents import AsyncSession, Session
from prefillshare_agents.testing import FakeServer

TASK: Any = {"role": "user", "content": "How far is the moon?"}


@pytest.fixture
def session(server: FakeServer) -> Session:
    return Session("s1", base_url=server.url, messages=[TASK])


def deletes(server: FakeServer) -> list[str]:
    return [item.path for item in server.requests if item.method == "DELETE"]


def test_close_ends_the_session_on_the_server(session: Session, server: FakeServer) -> None:
    session.chat("planner")
    session.close()
    session.close()

    assert deletes(server) == ["/v1/sessions/s1"]
    assert server.sessions == {}
    with pytest.raises(RuntimeError, match="closed"):
        session.chat("planner")


def test_a_close_that_failed_can_be_tried_again(session: Session, server: FakeServer) -> None:
    session.chat("planner")
    server.fail(403)
    with pytest.raises(openai.PermissionDeniedError):
        session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.chat("planner")
    session.close()

    assert deletes(server) == ["/v1/sessions/s1"] * 2
    assert server.sessions == {}


async def test_an_async_close_that_failed_can_be_tried_again(server: FakeServer) -> None:
    session = AsyncSession("s1", base_url=server.url, messages=[TASK])
    await session.chat("planner")
    server.fail(403)
    with pytest.raises(openai.PermissionDeniedError):
        await session.close()
    with pytest.raises(RuntimeError, match="closed"):
        await session.chat("planner")
    await session.close()

    assert deletes(server) == ["/v1/sessions/s1"] * 2
    assert server.sessions == {}


def test_a_session_that_the_server_does_not_know_closes(
    session: Session, server: FakeServer
) -> None:
    session.close()
    session.close()

    assert deletes(server) == ["/v1/sessions/s1"]


async def test_a_branch_whose_client_is_closed_says_what_to_close_first(
    session: Session, server: FakeServer
) -> None:
    branch = session.fork()
    session.close()
    with pytest.raises(RuntimeError, match=f"'s1' is closed.*close '{branch.id}' before it"):
        branch.close()
    async_session = AsyncSession("s2", base_url=server.url, messages=[TASK])
    async_branch = async_session.fork()
    await async_session.close()
    with pytest.raises(RuntimeError, match=f"'s2' is closed.*close '{async_branch.id}' before it"):
        await async_branch.close()


def test_totals_of_a_closed_session_say_that_it_is_closed(session: Session) -> None:
    session.chat("planner")
    session.close()

    with pytest.raises(RuntimeError, match="'s1' is closed"):
        session.totals()


async def test_async_totals_of_a_closed_session_say_that_it_is_closed(
    server: FakeServer,
) -> None:
    session = AsyncSession("s1", base_url=server.url, messages=[TASK])
    await session.close()

    with pytest.raises(RuntimeError, match="'s1' is closed"):
        await session.totals()
