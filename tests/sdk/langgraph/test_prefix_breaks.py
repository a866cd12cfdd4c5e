"""What a chat model does with a prefix break is the user's choice."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from prefillshare_agents import PrefixBreakError, PrefixBreakWarning, Session
from prefillshare_agents.langgraph import ChatPrefillShare, Team
from prefillshare_agents.testing import FakeServer

MADE: dict[str, Callable[..., ChatPrefillShare]] = {
    "ChatPrefillShare": lambda url, **o: ChatPrefillShare(model="critic", base_url=url, **o),
    "Team": lambda url, **o: Team(url, ["critic"], **o).model("critic"),
    "Team.model": lambda url, **o: Team(url, ["critic"]).model("critic", **o),
    "over the team's": lambda url, **o: Team(url, ["critic"], on_prefix_break="warn").model(
        "critic", **o
    ),
}
REST: Any = [AIMessage("First the Forum."), HumanMessage("And then?")]


async def break_prefix(model: ChatPrefillShare, *, asynchronous: bool) -> None:
    try:
        with Session("s"):
            for clock in ("10:41", "10:42"):
                messages = [HumanMessage(f"It is {clock}. Plan a day."), *REST]
                await model.ainvoke(messages) if asynchronous else model.invoke(messages)
    finally:
        model.root_client.close()
        await model.root_async_client.close()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("how", MADE)
async def test_a_break_can_be_refused(how: str, asynchronous: bool, server: FakeServer) -> None:
    model = MADE[how](server.url, on_prefix_break="raise")
    with pytest.raises(PrefixBreakError, match="10:42"):
        await break_prefix(model, asynchronous=asynchronous)

    assert model.on_prefix_break == "raise"
    assert len(server.chats) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("how", MADE)
async def test_a_break_can_be_ignored(how: str, asynchronous: bool, server: FakeServer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = MADE[how](server.url, on_prefix_break="ignore")
        await break_prefix(model, asynchronous=asynchronous)

    assert [set(chat.body) for chat in server.chats] == [{"model", "messages", "stream"}] * 2


async def test_a_break_is_told_by_default(server: FakeServer) -> None:
    with pytest.warns(PrefixBreakWarning, match="10:42"):
        await break_prefix(MADE["Team"](server.url), asynchronous=False)


def test_another_word_is_refused(server: FakeServer) -> None:
    with pytest.raises(ValueError, match="on_prefix_break"):
        MADE["ChatPrefillShare"](server.url, on_prefix_break="shout")
    with pytest.raises(ValueError, match="on_prefix_break"):
        MADE["Team.model"](server.url, on_prefix_break="shout")
