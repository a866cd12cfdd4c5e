"""Prefix breaks are told by the client: before sending, or as the server found them."""

import itertools
import json
import warnings
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from prefillshare_agents import (
    AsyncOpenAI,
    OpenAI,
    PrefixBreakError,
    PrefixBreakWarning,
    Session,
)
from prefillshare_agents._prefix_watch import server_said, verdict_in
from prefillshare_agents.testing import FakeServer

TASK: Any = {"role": "user", "content": "How far is the moon from the earth, and how do we know?"}
ANSWER: Any = {"role": "assistant", "content": "384,400 km, by radar and by laser."}
MORE: Any = {"role": "user", "content": "And the sun?"}
RULES = "Answer in one sentence, name your sources, and say so where you are not sure. " * 3
CLOCK: Any = {"role": "user", "content": f"It is 10:41. How far is the moon from here? {RULES}"}
LATER: Any = {"role": "user", "content": f"It is 10:42. How far is the moon from here? {RULES}"}
LATEST: Any = {"role": "user", "content": f"It is 10:43. How far is the moon from here? {RULES}"}

_ids = itertools.count()


@pytest.fixture
def session_id() -> str:
    return f"breaks-{next(_ids)}"


@pytest.fixture
def client(server: FakeServer, session_id: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url, api_key="local", session=session_id) as made:
        yield made


def send(client: OpenAI, *messages: Any, role: str = "planner", **options: Any) -> Any:
    return client.chat.completions.create(model=role, messages=list(messages), **options)


def told(client: OpenAI, *contexts: tuple[Any, ...]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for context in contexts:
            send(client, *context)
    return [str(item.message) for item in caught if item.category is PrefixBreakWarning]


def test_a_growing_context_is_nothing_to_tell(client: OpenAI) -> None:
    assert told(client, (TASK,), (TASK, ANSWER, MORE)) == []


def test_another_role_with_other_instructions_is_nothing_to_tell(client: OpenAI) -> None:
    plan: Any = {"role": "system", "content": "Plan."}
    judge: Any = {"role": "system", "content": "Judge."}
    assert told(client, (plan, TASK), (judge, TASK, ANSWER, MORE)) == []


def test_an_edited_message_is_told_with_its_place_cause_and_remedy(
    client: OpenAI, session_id: str
) -> None:
    [text] = told(client, (CLOCK,), (LATER, ANSWER))

    assert session_id in text
    assert "timestamp" in text
    assert "messages[0]" in text
    assert "10:41" in text
    assert "10:42" in text


def test_a_cause_is_told_once_per_session(client: OpenAI) -> None:
    later = [
        {"role": "user", "content": f"It is 10:4{i}. How far is it? {RULES}"} for i in range(5)
    ]
    assert len(told(client, *((item,) for item in later))) == 1


def test_the_warning_points_at_the_callers_line(client: OpenAI) -> None:
    send(client, CLOCK)
    with pytest.warns(PrefixBreakWarning) as caught:
        send(client, LATER)

    [told] = [each for each in caught if each.category is PrefixBreakWarning]
    assert told.filename == __file__


def test_with_raise_nothing_is_sent_and_nothing_remembered(
    client: OpenAI, server: FakeServer
) -> None:
    strict = client.with_options(on_prefix_break="raise")
    send(strict, CLOCK)
    with pytest.raises(PrefixBreakError, match="timestamp"):
        send(strict, LATER)
    send(strict, CLOCK, ANSWER)

    assert [len(chat.body["messages"]) for chat in server.chats] == [1, 2]


def test_with_raise_the_server_may_refuse_too(client: OpenAI, server: FakeServer) -> None:
    send(client.with_options(on_prefix_break="raise"), TASK)

    assert server.chats[0].header("x-prefillshare-strict") == "true"


def test_a_break_that_only_the_server_knows_is_refused_there(
    client: OpenAI, server: FakeServer, session_id: str
) -> None:
    other_process = {"X-Session-ID": session_id}
    strict = client.with_options(on_prefix_break="raise")
    with openai.OpenAI(base_url=server.url, api_key="k", default_headers=other_process) as plain:
        plain.chat.completions.create(model="planner", messages=[CLOCK])
    with pytest.raises(PrefixBreakError):
        send(strict, LATER)


def test_with_ignore_nothing_is_told(client: OpenAI) -> None:
    assert told(client.with_options(on_prefix_break="ignore"), (CLOCK,), (LATER,)) == []


def test_an_unknown_policy_is_refused(server: FakeServer) -> None:
    with pytest.raises(ValueError, match="on_prefix_break is 'shout'"):
        OpenAI(base_url=server.url, api_key="k", on_prefix_break="shout")  # type: ignore[arg-type]


def test_tasks_that_have_nothing_in_common_are_nothing_to_tell(client: OpenAI) -> None:
    tasks = [{"role": "user", "content": text} for text in ("Count to ten.", "Who was Ada?")]
    assert told(client, *((task,) for task in tasks)) == []


def test_a_task_of_its_own_is_sent_also_with_raise(client: OpenAI, server: FakeServer) -> None:
    strict = client.with_options(on_prefix_break="raise")
    send(strict, {"role": "user", "content": "Count to ten."})
    send(strict, {"role": "user", "content": "Who was Ada Lovelace?"})

    assert len(server.chats) == 2


def test_a_request_that_failed_was_not_sent_as_far_as_breaks_go(
    client: OpenAI, server: FakeServer
) -> None:
    server.fail(400)
    with pytest.raises(openai.BadRequestError):
        send(client, CLOCK)

    assert told(client, (LATER, ANSWER)) == []


def test_a_client_that_ignores_breaks_does_not_silence_another(client: OpenAI) -> None:
    careless = client.with_options(on_prefix_break="ignore")
    assert told(careless, (CLOCK, ANSWER), (LATER, ANSWER)) == []
    assert len(told(client, (CLOCK, ANSWER, MORE, MORE), (LATEST, ANSWER, MORE))) == 1


def test_tasks_that_are_worded_alike_are_nothing_to_tell(client: OpenAI) -> None:
    """As the branches of a map-reduce graph send them."""
    tasks = [{"role": "user", "content": f"Generate a joke about {name}"} for name in ("a", "b")]
    assert told(client, *((task,) for task in tasks)) == []


def test_without_a_session_nothing_is_compared(server: FakeServer) -> None:
    with OpenAI(base_url=server.url, api_key="k") as client:
        assert told(client, (CLOCK,), (LATER,)) == []


def test_clients_of_one_process_know_of_each_others_calls(
    client: OpenAI, server: FakeServer, session_id: str
) -> None:
    send(client, CLOCK)
    with OpenAI(base_url=server.url, api_key="k", session=session_id) as other:
        assert len(told(other, (LATER,))) == 1


def test_what_the_server_found_is_told_once_and_not_after_the_wire_told_it(
    session_id: str,
) -> None:
    verdict = {"cause": "template", "token_index": 12, "lost_tokens": 30, "fix": "Fix it."}
    with pytest.warns(PrefixBreakWarning, match=r"token 12 \(template\); 30 tokens.*Fix it"):
        server_said("http://s", session_id, verdict, "warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        server_said("http://s", session_id, verdict, "warn")


def test_the_servers_verdict_reaches_every_kind_of_call(server: FakeServer) -> None:
    calls: list[dict[str, Any]] = [{}, {"stream": True}]
    for options in calls:
        first, second = f"breaks-{next(_ids)}", {"X-Session-ID": f"breaks-{next(_ids)}"}
        with openai.OpenAI(base_url=server.url, api_key="k", default_headers=second) as plain:
            plain.chat.completions.create(model="planner", messages=[CLOCK])
        assert first not in second.values()
        with (
            OpenAI(base_url=server.url, api_key="k", session=second["X-Session-ID"]) as client,
            pytest.warns(PrefixBreakWarning, match="the server found"),
        ):
            send(client, LATER, **options)


def test_a_raw_response_tells_the_verdict_too(server: FakeServer, session_id: str) -> None:
    headers = {"X-Session-ID": session_id}
    with openai.OpenAI(base_url=server.url, api_key="k", default_headers=headers) as plain:
        plain.chat.completions.create(model="planner", messages=[CLOCK])
    with (
        OpenAI(base_url=server.url, api_key="k", session=session_id) as client,
        pytest.warns(PrefixBreakWarning, match="the server found"),
    ):
        client.chat.completions.with_raw_response.create(model="planner", messages=[LATER])


@pytest.mark.parametrize("value", ["", "{", "[1", None])
def test_a_verdict_that_is_no_json_is_none(value: str | None) -> None:
    assert verdict_in({} if value is None else {"x-prefillshare-break": value}) is None
    assert verdict_in({"x-prefillshare-break": json.dumps({"cause": "x"})}) == {"cause": "x"}


async def test_the_async_client_tells_the_same(server: FakeServer, session_id: str) -> None:
    async with AsyncOpenAI(base_url=server.url, api_key="k", session=session_id) as client:
        create = client.chat.completions.create
        await create(model="planner", messages=[CLOCK])
        with pytest.warns(PrefixBreakWarning, match="timestamp"):
            await create(model="planner", messages=[LATER])
        strict = client.with_options(on_prefix_break="raise")
        with pytest.raises(PrefixBreakError):
            await strict.chat.completions.create(model="planner", messages=[LATEST])


def test_a_session_never_breaks_its_own_prefix(server: FakeServer) -> None:
    with OpenAI(base_url=server.url, api_key="k", on_prefix_break="raise") as client:
        session = Session(client=client, messages=[TASK])
        start = session.checkpoint()
        for role in ("planner", "critic", "planner"):
            session.chat(role, instructions=f"You are {role}.")
        branch = session.fork()
        branch.append(MORE)
        branch.chat("solver")
        session.merge(branch)
        session.chat("critic")
        session.restore(start)
        session.append(MORE)
        session.chat("planner")
        session.close()
