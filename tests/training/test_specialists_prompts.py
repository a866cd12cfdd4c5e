"""Train = serve: the rows' prompts are those that the graph sends."""

from collections.abc import Iterator

import pytest
from rich.console import Console

from examples.react.__main__ import answer
from examples.react.graph import build
from examples.react.roles import ROLES
from examples.react.tools import FACTS
from examples.specialists.episodes import Episode, Message
from examples.specialists.generate import Row
from examples.specialists.places import Place
from prefillshare_agents.langgraph import Team
from prefillshare_agents.testing import FakeServer
from prefillshare_server.models.layout import Layout, context_first

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAYOUT = Layout(context_first(CHATML, tail_role="user"), "user")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def known(name: str, *, article: bool) -> Place:
    return Place(name, article, FACTS[name]["height_m"], FACTS[name]["about"])


def turns(episode: Episode) -> list[tuple[str, list[Message], Message]]:
    """Role, conversation and answer of every call of the run, an objection included."""
    found = []
    for step in range(3):
        before = episode.so_far(step)
        found.append(("planner", before, episode.plan(step)))
        found.append(("toolcaller", [*before, episode.plan(step)], episode.call(step)))
    before = episode.so_far(3)
    # The solver is wrong at first and is told so.
    wrong = {**episode.solution(), "content": '{"answer": "It is 7 times higher"}'}
    objection = episode.judgement("7")
    found.append(("solver", before, wrong))
    found.append(("critic", [*before, wrong], objection))
    found.append(("solver", [*before, wrong, objection], episode.solution()))
    again = [*before, wrong, objection, episode.solution()]
    found.append(("critic", again, episode.judgement(episode.number)))
    return found


def test_a_rows_prompt_is_what_the_graph_sends(server: FakeServer) -> None:
    high, low = known("Burj Khalifa", article=False), known("Eiffel Tower", article=True)
    asked = f"How many times higher is {high.spoken} than {low.spoken}?"
    planned = turns(Episode(asked, high, low, (high, low)))
    server.script([wanted for _, _, wanted in planned])
    team = Team(server.url, ROLES)

    answer(Console(quiet=True), team, build(team), asked)

    team.close()
    assert [chat.body["model"] for chat in server.chats] == [role for role, _, _ in planned]
    # The run puts a number of its own in front of the question.
    question = server.chats[0].body["messages"][1]["content"]
    assert question.endswith(asked)
    episode = Episode(question, high, low, (high, low))
    for chat, (role, messages, wanted) in zip(server.chats, turns(episode), strict=True):
        row = Row(role, episode, messages, wanted)
        sent = LAYOUT.render(chat.body["messages"], chat.body.get("tools"))
        assert sent == LAYOUT.render(row.prompt, row.tools)
