"""What a test tells the fake server to answer."""

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from prefillshare_agents.testing import Failure, FakeServer, Request, tool_call

from .conftest import Ask


def text(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def test_a_role_gets_its_own_answers_and_others_those_for_any_role(
    server: FakeServer, ask: Ask
) -> None:
    server.script("planner", ["one", "two"])
    server.script(["any"])

    assert [text(ask(role)) for role in ("planner", "critic", "planner")] == ["one", "any", "two"]


def test_without_a_script_the_answer_names_the_role(ask: Ask) -> None:
    assert text(ask("critic")) == "an answer by critic"


def test_a_function_sees_the_request_and_answers_every_call(server: FakeServer, ask: Ask) -> None:
    def echo(request: Request) -> str:
        return f"{request.role} in {request.session}: {request.body['messages'][-1]['content']}"

    server.script("planner", echo)

    assert [text(ask()), text(ask(session="s2"))] == [
        "planner in s1: hello",
        "planner in s2: hello",
    ]


def test_a_function_in_the_list_answers_one_call(server: FakeServer, ask: Ask) -> None:
    server.script("planner", [lambda _: "first", "second"])

    assert [text(ask()), text(ask())] == ["first", "second"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_function_is_an_error_that_is_not_retried(
    stream: bool, server: FakeServer, client: openai.OpenAI
) -> None:
    def broken(_: Request) -> str:
        raise KeyError("no such answer")

    server.script(broken)
    with pytest.raises(openai.InternalServerError, match="no such answer"):
        client.with_options(max_retries=3).chat.completions.create(
            model="planner",
            messages=[{"role": "user", "content": "x"}],
            stream=stream,
        )
    assert len(server.chats) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_arrives_whole_with_an_id_of_its_own(
    stream: bool, server: FakeServer, client: openai.OpenAI
) -> None:
    server.script([tool_call("lookup", place="Big Ben"), tool_call("lookup", place="Shard")])
    found = []
    for _ in range(2):
        messages: Any = [{"role": "user", "content": "x"}]
        if stream:
            with client.chat.completions.stream(model="caller", messages=messages) as events:
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.create(model="caller", messages=messages)  # type: ignore[assignment]
        assert answer.choices[0].finish_reason == "tool_calls"
        found += answer.choices[0].message.tool_calls or []

    assert [json.loads(call.function.arguments)["place"] for call in found] == ["Big Ben", "Shard"]
    assert len({call.id for call in found}) == 2


def test_tool_arguments_given_as_text_are_sent_byte_for_byte(server: FakeServer, ask: Ask) -> None:
    arguments = '{ "place":  "B\\u0069g Ben" }'
    server.script([{"tool_calls": [{"name": "lookup", "arguments": arguments}]}])

    assert ask().choices[0].message.tool_calls[0].function.arguments == arguments


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_comes_before_the_answer(stream: bool, server: FakeServer, ask: Ask) -> None:
    server.script([{"reasoning": "Near.", "content": "384,400 km"}])
    answer = ask(stream=stream)
    if stream:
        said = [chunk.choices[0].delta.to_dict() for chunk in answer if chunk.choices]
        names = [name for delta in said[1:] for name in delta]
        assert names == sorted(names, reverse=True)
        assert "".join(delta.get("reasoning", "") for delta in said) == "Near."
    else:
        assert answer.choices[0].message.reasoning == "Near."


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_can_have_been_cut_off(stream: bool, server: FakeServer, ask: Ask) -> None:
    server.script([{"content": '{"half', "finish_reason": "length"}])
    answer = ask(stream=stream)
    last = list(answer)[-1] if stream else answer

    assert last.choices[0].finish_reason == "length"


def test_several_choices_are_answered_one_by_one(server: FakeServer, ask: Ask) -> None:
    server.script(["one", "two"])

    assert [choice.message.content for choice in ask(n=2).choices] == ["one", "two"]


def test_fail_comes_before_the_script(server: FakeServer, ask: Ask) -> None:
    server.script(["kept"])
    server.fail(Failure(503, "no_worker", "nobody there"))

    with pytest.raises(openai.InternalServerError, match="nobody there"):
        ask()
    assert text(ask()) == "kept"


def test_a_client_repeats_a_failed_call_at_once(server: FakeServer, client: openai.OpenAI) -> None:
    server.fail(503, 429)
    client.with_options(max_retries=2).chat.completions.create(
        model="planner", messages=[{"role": "user", "content": "x"}]
    )

    assert [chat.status for chat in server.chats] == [503, 429, 200]


def test_a_failure_can_stand_in_a_script(server: FakeServer, ask: Ask) -> None:
    server.script("critic", [400, "fine"])

    with pytest.raises(openai.BadRequestError):
        ask("critic")
    assert text(ask("critic")) == "fine"


def test_a_call_without_a_scripted_answer_is_an_error_where_that_is_asked_for() -> None:
    with FakeServer(strict_script=True) as server:
        server.script("planner", ["one"])
        with openai.OpenAI(base_url=server.url, api_key="local") as client:
            messages: Any = [{"role": "user", "content": "x"}]
            client.chat.completions.create(model="planner", messages=messages)
            with pytest.raises(openai.BadRequestError, match=r"call 1 \(role 'critic'"):
                client.chat.completions.create(model="critic", messages=messages)

        with pytest.raises(AssertionError, match=r"call 1 \(role 'critic'"):
            server.assert_script_used()


def test_answers_that_nobody_asked_for_are_told(server: FakeServer, ask: Ask) -> None:
    server.script("planner", ["one", "two"])
    ask()
    with pytest.raises(AssertionError, match="1 for planner"):
        server.assert_script_used()
    ask()
    server.assert_script_used()


@pytest.mark.parametrize("after", [None, 0, 2])
def test_a_cut_stream_ends_without_a_finish_reason(
    after: int | None, server: FakeServer, ask: Ask
) -> None:
    server.script(["one two three"] * 2)
    server.cut_stream(after=after)
    cut, whole = list(ask(stream=True)), list(ask(stream=True))

    assert len(cut) == (4 if after is None else after)
    assert all(chunk.choices[0].finish_reason is None for chunk in cut)
    assert whole[-1].choices[0].finish_reason == "stop"
    assert [chat.answered_at is None for chat in server.chats] == [True, False]


def test_a_stream_can_end_with_the_servers_error(server: FakeServer, ask: Ask) -> None:
    server.cut_stream(after=2, how="error")

    with pytest.raises(openai.APIError, match="scripted failure") as raised:
        list(ask(stream=True))
    assert raised.value.code == "decode_aborted"


def test_a_connection_can_break_under_a_stream(server: FakeServer, ask: Ask) -> None:
    server.cut_stream(after=1, how="reset")

    with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):
        list(ask(stream=True))


def test_held_answers_wait_until_they_are_released(server: FakeServer, ask: Ask) -> None:
    release = threading.Event()
    server.delay(release, role="planner")
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    server.wait_for_chats(4, 60)
    ask("critic")

    assert [chat.answered_at for chat in server.chats[:4]] == [None] * 4
    release.set()
    for thread in threads:
        thread.join(60)
    assert [chat.status for chat in server.chats] == [200] * 5


def test_a_stream_can_be_held_in_the_middle(server: FakeServer, ask: Ask) -> None:
    release = threading.Event()
    server.delay(release, after=2)
    stream = ask(stream=True)
    seen = [next(stream), next(stream)]

    assert server.chats[0].answered_at is None
    release.set()
    assert len(seen + list(stream)) == 6


def test_waiting_for_calls_that_do_not_come_ends(server: FakeServer, ask: Ask) -> None:
    ask()
    with pytest.raises(TimeoutError, match="1 chats"):
        server.wait_for_chats(2, timeout=0.01)
