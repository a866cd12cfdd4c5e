"""A chat model's tokens are counted by the server, as it would render the call."""

from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage, trim_messages
from langchain_core.tools import tool

from prefillshare_agents.langgraph import ChatPrefillShare, Team
from prefillshare_agents.testing import FakeServer

MESSAGES: Any = [SystemMessage("Be short."), HumanMessage("How far is the moon?")]


@tool
def look(name: str) -> str:
    """Look something up."""
    return name


def test_the_count_is_that_of_the_call(team: Team, server: FakeServer) -> None:
    model = team.model("critic")
    bound: Any = model.bind_tools([look])
    cases: Any = [(None, model), ([look], bound)]
    for tools, called in cases:
        counted = model.get_num_tokens_from_messages(MESSAGES, tools)
        assert called.invoke(MESSAGES).usage_metadata["input_tokens"] == counted


def test_a_texts_tokens_are_the_servers(team: Team, server: FakeServer) -> None:
    assert team.model("critic").get_num_tokens("How far?") == 3
    assert server.requests[-1].body == {
        "model": "critic",
        "prompt": "How far?",
        "add_special_tokens": False,
    }


def test_a_counter_of_the_users_own_comes_first(server: FakeServer) -> None:
    model = ChatPrefillShare(
        model="critic", base_url=server.url, custom_get_token_ids=lambda text: [1]
    )

    assert model.get_num_tokens("How far?") == 1
    assert not server.requests


def test_messages_are_trimmed_by_the_servers_count(team: Team) -> None:
    model = team.model("critic")
    fits = model.get_num_tokens_from_messages(MESSAGES[1:])

    assert trim_messages(MESSAGES, max_tokens=fits, token_counter=model) == MESSAGES[1:]
