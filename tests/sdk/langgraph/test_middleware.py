"""`PrefillShareMiddleware` and `Team.agent`: agents of `create_agent` in one session."""

from typing import Any

import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    SummarizationMiddleware,
    before_model,
    wrap_model_call,
)
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel

from prefillshare_agents import PrefixBreakWarning, Session, current_session
from prefillshare_agents.langgraph import (
    ChatPrefillShare,
    PrefillShareMiddleware,
    Team,
    worth_retrying,
)
from prefillshare_agents.langgraph._adopt import adopted
from prefillshare_agents.testing import FakeServer
from prefillshare_agents.testing import tool_call as call_of

TASK: Any = {"messages": [("user", "How far is the moon, in miles?")]}


@tool
def search(name: str) -> str:
    """Look something up."""
    return f"{name}: 384,400 km"


@tool
def compute(expression: str) -> str:
    """Work something out."""
    return "238,855"


class Verdict(BaseModel):
    """What the critic says."""

    right: bool


def plain(server: FakeServer, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model="solver", base_url=server.url, api_key="local", **options)  # type: ignore[arg-type]


def react(server: FakeServer) -> None:
    server.script([call_of("search", name="moon"), call_of("compute", expression="x"), "Far."])


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_agent_with_a_plain_model_shares_everything_it_can(
    asynchronous: bool, server: FakeServer
) -> None:
    react(server)
    agent = create_agent(
        plain(server),
        [search, compute],
        system_prompt="Solve it.",
        middleware=[PrefillShareMiddleware()],
    )
    with Session("s1") as session:
        state = await agent.ainvoke(TASK) if asynchronous else agent.invoke(TASK)

    assert [chat.sessions for chat in server.chats] == [["s1"]] * 3
    assert [chat.body["messages"][0]["role"] for chat in server.chats] == ["system"] * 3
    tools = [[item["function"]["name"] for item in chat.body["tools"]] for chat in server.chats]
    assert tools == [["compute", "search"]] * 3
    assert session.usage.calls == 3
    assert session.usage.cached_tokens > 0
    assert state["messages"][-1].text == "Far."
    server.assert_shared(1.0)


def test_the_plain_models_own_options_and_headers_are_kept(server: FakeServer) -> None:
    model = plain(server, temperature=0.5, default_headers={"X-Mine": "1"}, max_retries=7)
    ours = adopted(model)

    assert isinstance(ours, ChatPrefillShare)
    assert (ours.temperature, ours.root_client.max_retries) == (0.5, 7)
    assert ours.root_client.default_headers["X-Mine"] == "1"
    assert ours.root_client._client is model.root_client._client


def test_models_of_other_servers_are_let_alone() -> None:
    assert adopted(ChatOpenAI(model="gpt-x", api_key="k")) is None  # type: ignore[arg-type]
    assert adopted(GenericFakeChatModel(messages=iter([]))) is None


@pytest.mark.parametrize(
    "options",
    [
        {"use_responses_api": True},
        {"reasoning": {"effort": "low"}},
        {"output_version": "responses/v1"},
        {"truncation": "auto"},
    ],
    ids=str,
)
def test_a_model_of_the_responses_api_is_let_alone_with_a_warning(
    options: Any, server: FakeServer
) -> None:
    model = plain(server, **options)
    [name] = options
    with pytest.warns(UserWarning, match=f"model 'solver' is used as it is.*{name} is"):
        assert adopted(model) is None


class OwnChat(ChatOpenAI):
    """A subclass with ways of its own."""


async def key() -> str:
    return "local"


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, OwnChat),
        ({"api_key": key}, ChatOpenAI),
        ({"client": object()}, ChatOpenAI),
        ({"client": object(), "async_client": object()}, ChatOpenAI),
    ],
    ids=["subclass", "async key", "client", "clients"],
)
async def test_a_model_that_cannot_be_taken_over_is_let_alone_with_one_warning(
    options: Any, kind: type[ChatOpenAI], server: FakeServer
) -> None:
    model = kind(**{"model": "solver", "base_url": server.url, "api_key": "local", **options})
    middleware = PrefillShareMiddleware()
    told = (
        rf"model 'solver' at 127\.0\.0\.1 is used as it is, without a session: it is a "
        rf"{kind.__name__} .*PrefillShareMiddleware\(model=ChatPrefillShare\(\.\.\.\)\)"
    )
    with pytest.warns(UserWarning, match=told) as warned:
        assert [middleware._ours(model) for _ in range(2)] == [None, None]
    assert len([each for each in warned if each.category is UserWarning]) == 1


def test_a_subclass_answers_as_before(server: FakeServer) -> None:
    model = OwnChat(model="solver", base_url=server.url, api_key="local")  # type: ignore[arg-type]
    agent = create_agent(model, middleware=[PrefillShareMiddleware()])
    with Session("s1"), pytest.warns(UserWarning, match="OwnChat"):
        state = agent.invoke(TASK)

    assert state["messages"][-1].text
    assert [chat.sessions for chat in server.chats] == [[]]


@pytest.mark.parametrize("address", [None, "https://eu.api.openai.com/v1"])
def test_a_subclass_on_openais_servers_is_let_alone(address: str | None) -> None:
    assert adopted(OwnChat(model="gpt-x", base_url=address, api_key="k")) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("client_retries", [0, 2])
def test_a_retrying_middleware_retries_what_no_client_has(
    client_retries: int, server: FakeServer
) -> None:
    retrying = ModelRetryMiddleware(
        max_retries=2, retry_on=worth_retrying, on_failure="error", initial_delay=0, jitter=False
    )
    model = plain(server, max_retries=client_retries)
    server.script(lambda request: 503)
    with pytest.raises(openai.InternalServerError):
        create_agent(model, middleware=[retrying, PrefillShareMiddleware()]).invoke(TASK)

    assert len(server.chats) == 3


def test_a_fallback_to_another_provider_gets_no_session(server: FakeServer) -> None:
    other = GenericFakeChatModel(messages=iter([AIMessage("from elsewhere")]))
    agent = create_agent(
        ChatPrefillShare(model="solver", base_url=server.url, max_retries=0),
        middleware=[ModelFallbackMiddleware(other), PrefillShareMiddleware(session="s1")],
    )
    server.fail(503)

    assert agent.invoke(TASK)["messages"][-1].text == "from elsewhere"


def test_a_session_of_the_middleware_holds_for_its_agent_only(server: FakeServer) -> None:
    agent = create_agent(plain(server), middleware=[PrefillShareMiddleware(session="own")])
    with Session("block"):
        agent.invoke(TASK)
        ChatPrefillShare(model="critic", base_url=server.url).invoke("hello")

    assert [chat.sessions for chat in server.chats] == [["own"], ["block"]]


def test_instructions_are_for_agents_without_any(server: FakeServer) -> None:
    for prompt in (None, "The agent's own."):
        middleware = PrefillShareMiddleware(instructions="The middleware's.")
        create_agent(plain(server), system_prompt=prompt, middleware=[middleware]).invoke(TASK)

    heads = [chat.body["messages"][0]["content"] for chat in server.chats]
    assert heads == ["The middleware's.", "The agent's own."]


def test_a_teams_middleware_gives_an_agent_the_roles_model(team: Team, server: FakeServer) -> None:
    agent = create_agent(plain(server), middleware=[team.middleware("critic", temperature=0)])
    with team.session("s1") as session:
        agent.invoke(TASK)

    assert server.chats[0].body["model"] == "critic"
    assert server.chats[0].body["temperature"] == 0
    assert list(session.usage.roles) == ["critic"]


def test_a_session_that_is_known_by_its_id_records_nothing(server: FakeServer) -> None:
    entered = []

    @wrap_model_call
    def look(request: Any, handler: Any) -> Any:
        answer = handler(request)
        entered.append(current_session())
        return answer

    middleware = [PrefillShareMiddleware(session="s1"), look]
    create_agent(plain(server), middleware=middleware).invoke(TASK)

    assert [session.calls for session in entered if session] == [()]


def test_in_a_block_the_middlewares_session_is_the_one_of_that_id(server: FakeServer) -> None:
    agent = create_agent(plain(server), middleware=[PrefillShareMiddleware(session="s1")])
    with Session("s1") as session:
        agent.invoke(TASK)

    assert session.usage.calls == 1


def test_an_agent_of_a_team_takes_the_options_of_its_model(team: Team, server: FakeServer) -> None:
    team.agent("critic", temperature=0.5, max_tokens=7, name="judge").invoke(TASK)

    body = server.chats[0].body
    assert (body["temperature"], body["max_completion_tokens"]) == (0.5, 7)


def test_an_agent_of_a_team_refuses_what_nobody_takes(team: Team) -> None:
    with pytest.raises(TypeError, match="temprature"):
        team.agent("critic", temprature=0.5)


def test_options_beside_an_agents_own_model_are_refused(team: Team) -> None:
    with pytest.raises(ValueError, match="model= is given beside temperature="):
        team.agent("critic", model=team.model("solver"), temperature=0.5)


def test_an_agent_of_a_team_is_one_of_create_agent(team: Team, server: FakeServer) -> None:
    server.script(['{"right": true}'])
    agent = team.agent("critic", instructions="Judge.", response_format=Verdict)
    with team.session("s1"):
        state = agent.invoke(TASK)

    assert agent.name == "critic"
    assert state["structured_response"] == Verdict(right=True)
    assert server.chats[0].body["response_format"]["type"] == "json_schema"


def trimming() -> AgentMiddleware[Any, Any]:
    @before_model
    def trim(state: Any, runtime: Any) -> dict[str, Any] | None:
        first = state["messages"][0]
        return {"messages": [RemoveMessage(id=first.id)]} if len(state["messages"]) > 3 else None

    return trim


@pytest.mark.parametrize(
    ("breaker", "cause"),
    [
        (trimming(), "history_trimmed"),
        (
            SummarizationMiddleware(
                GenericFakeChatModel(messages=iter([AIMessage("It was about the moon.")])),
                trigger=("messages", 4),
                keep=("messages", 1),
            ),
            "history_summarised",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_middleware_that_breaks_the_prefix_is_told(
    breaker: Any, cause: str, server: FakeServer
) -> None:
    react(server)
    agent = create_agent(
        plain(server), [search, compute], middleware=[breaker, PrefillShareMiddleware()]
    )
    with Session(f"breaks-{cause}"), pytest.warns(PrefixBreakWarning, match=cause):
        agent.invoke(TASK)


def test_tool_results_that_are_cleared_in_place_are_told(server: FakeServer) -> None:
    server.script([call_of("search", name=name) for name in ("moon", "sun", "Mars")] + ["Far."])
    clearing = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1, keep=2)])
    agent = create_agent(plain(server), [search], middleware=[clearing, PrefillShareMiddleware()])
    told = r"message_edited.*messages\[2\].content: 'moon: 384,400 km' became '\[cleared\]'"
    with Session("clears"), pytest.warns(PrefixBreakWarning, match=told):
        agent.invoke(TASK)


def test_other_roles_answers_are_told_apart_behind_the_conversation(
    team: Team, server: FakeServer
) -> None:
    graph = StateGraph(MessagesState)
    for role in ("planner", "critic"):
        graph.add_node(role, team.agent(role, instructions=f"You are the {role}."))
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "critic")
    app: Any = graph.compile()
    with team.session("s1"):
        app.invoke(TASK)

    first, second = (chat.body["messages"] for chat in server.chats)
    assert [item.get("name") for item in first] == [None, None]
    assert [item.get("name") for item in second] == [None, None, "planner"]
    server.assert_shared(1.0)


def test_roles_trained_without_speakers_get_none(server: FakeServer) -> None:
    team = Team(server.url, ["planner", "critic"], speakers=False)
    answer = AIMessage("A plan.", name="planner")
    team.model("critic").invoke([HumanMessage("hello"), answer, HumanMessage("Go on.")])
    team.close()

    assert all("name" not in item for item in server.chats[0].body["messages"])
