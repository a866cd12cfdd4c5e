"""`Session`: one growing context that several roles answer."""

import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from rich.console import Console

from prefillshare_agents import AnswerError, OpenAI, RoleUsage, Session
from prefillshare_agents.testing import FakeServer

TASK: Any = {"role": "user", "content": "How far is the moon?"}


class Verdict(BaseModel):
    right: bool


# Blanks and an escape that no JSON library would write again.
ARGUMENTS = '{ "name":  "m\\u006fon" }'
TOOL_CALL: Any = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "lookup", "arguments": ARGUMENTS},
}


@pytest.fixture
def session(server: FakeServer) -> Iterator[Session]:
    made = Session("s1", base_url=server.url, messages=[TASK])
    yield made
    made.close()


def calling(*tool_calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(tool_calls)}


def read(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_a_call_sends_the_instructions_before_the_context(
    session: Session, server: FakeServer
) -> None:
    session.chat("planner", instructions="Plan.", temperature=0)

    body = server.chats[0].body
    assert body["model"] == "planner"
    assert body["temperature"] == 0
    assert body["messages"] == [{"role": "system", "content": "Plan."}, TASK]
    assert server.chats[0].sessions == ["s1"]


def test_the_answer_joins_the_context_and_the_instructions_do_not(
    session: Session, server: FakeServer
) -> None:
    server.script(["Look it up."])
    session.chat("planner", instructions="Plan.")

    answer = {"role": "assistant", "content": "Look it up.", "name": "planner"}
    assert session.messages == (TASK, answer)


def test_a_streamed_answer_joins_the_context_when_it_has_ended(
    session: Session, server: FakeServer
) -> None:
    server.script(["384,400 km"])
    stream = session.chat("solver", stream=True)
    first = next(stream)

    assert len(session.messages) == 1
    assert first.choices[0].delta.content == ""
    assert read(stream) == "384,400 km"
    assert session.messages[-1]["content"] == "384,400 km"


def test_a_closed_stream_leaves_the_context_as_it_was(session: Session) -> None:
    with session.chat("solver", stream=True) as stream:
        next(stream)

    assert session.messages == (TASK,)
    assert session.calls == ()


def test_a_stream_that_is_cut_short_raises_and_is_not_kept(
    session: Session, server: FakeServer
) -> None:
    server.cut_stream()

    with pytest.raises(openai.OpenAIError, match="finish_reason"):
        read(session.chat("solver", stream=True))
    assert session.messages == (TASK,)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_kept_byte_for_byte(
    stream: bool, session: Session, server: FakeServer
) -> None:
    server.script([{"tool_calls": [TOOL_CALL]}])
    answer: Any = session.chat("caller", stream=stream)
    if stream:
        list(answer)
    session.append({"role": "tool", "tool_call_id": "call_1", "content": "384,400 km"})
    session.chat("solver")

    assistant = server.chats[1].body["messages"][1]
    assert assistant == {
        "role": "assistant",
        "name": "caller",
        "content": None,
        "tool_calls": [TOOL_CALL],
    }


def test_a_tools_result_goes_behind_its_call_past_another_roles_answer(
    session: Session, server: FakeServer
) -> None:
    session.append(calling(TOOL_CALL), {"role": "assistant", "content": "Meanwhile."})
    session.append({"role": "tool", "tool_call_id": "call_1", "content": "384,400 km"})
    session.chat("solver")

    roles = [message["role"] for message in server.chats[0].body["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]


def test_an_answer_that_cannot_join_is_counted_and_given_with_the_error(
    session: Session, server: FakeServer
) -> None:
    server.script({"tool_calls": [TOOL_CALL, TOOL_CALL]})
    with pytest.raises(AnswerError, match=r"role 'caller' .*two tool calls have the id") as caught:
        session.chat("caller")

    assert len(caught.value.answer["tool_calls"]) == 2
    assert session.usage.calls == 1
    assert session.messages == (TASK,)


@pytest.mark.parametrize("tools", [openai.NOT_GIVEN, openai.omit])
def test_tools_may_be_left_out_in_openais_ways(
    tools: Any, session: Session, server: FakeServer
) -> None:
    session.chat("caller", tools=tools)

    assert "tools" not in server.chats[0].body


def test_reasoning_is_kept_in_both_modes(session: Session, server: FakeServer) -> None:
    answer = {"reasoning": "The moon is near.", "content": "384,400 km"}
    server.script([answer, answer])
    session.chat("solver")
    read(session.chat("solver", stream=True))

    expected = {"role": "assistant", "name": "solver", **answer}
    assert session.messages[1] == session.messages[2] == expected


def test_tools_are_sent_with_their_own_call_only(session: Session, server: FakeServer) -> None:
    tool = {"type": "function", "function": {"name": "lookup", "parameters": {}}}
    session.chat("caller", tools=[tool])
    session.chat("solver")

    assert server.chats[0].body["tools"] == [tool]
    assert "tools" not in server.chats[1].body


def test_a_failed_call_leaves_the_context_as_it_was(session: Session, server: FakeServer) -> None:
    server.fail(400)

    with pytest.raises(openai.BadRequestError):
        session.chat("solver")
    assert session.messages == (TASK,)


def test_messages_are_copies(session: Session) -> None:
    mine = {"role": "user", "content": "and Mars?"}
    session.append(mine)
    mine["content"] = "changed"
    session.messages[0]["content"] = "changed"

    assert [item["content"] for item in session.messages] == [TASK["content"], "and Mars?"]


def test_a_message_object_of_a_response_can_be_appended(
    server: FakeServer, session: Session
) -> None:
    with OpenAI(base_url=server.url, api_key="local") as client:
        completion = client.chat.completions.create(model="solver", messages=[TASK])
    session.append(completion.choices[0].message)

    assert session.messages[1] == {"role": "assistant", "content": "an answer by solver"}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "robot", "content": "x"}, "role is 'robot'"),
        ({"content": "x"}, "role is None"),
        ({"role": "user"}, "content is None"),
        ({"role": "user", "content": 3}, "content is 3"),
        ({"role": "user", "content": "x", "tool_calls": [TOOL_CALL]}, "only an assistant"),
        ({"role": "tool", "tool_call_id": "call_9", "content": "x"}, r"'call_9'.*open: none"),
        ({"role": "tool", "tool_call_id": ["call_1"], "content": "x"}, "no open tool call"),
        (calling({"function": {}}), "no id"),
        (calling("lookup"), "'lookup' is not a dictionary"),
        (calling({"id": "call_1", "function": "lookup"}), "names no function"),
        (calling({"id": "call_1", "function": {}}), "names no function"),
        ({"role": "assistant", "content": None, "tool_calls": "lookup"}, "tool_calls is 'lookup'"),
        (calling(TOOL_CALL, TOOL_CALL), "two tool calls have the id 'call_1'"),
    ],
)
def test_a_message_that_cannot_stand_is_refused_with_its_place(
    message: Any, reason: str, session: Session
) -> None:
    with pytest.raises(ValueError, match=rf"messages\[2\]: .*{reason}"):
        session.append({"role": "user", "content": "fine"}, message)
    assert session.messages == (TASK,)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_context_can_hold_a_system_message_but_not_start_with_it(role: str) -> None:
    message = {"role": role, "content": "You are kind."}
    with pytest.raises(ValueError, match="instructions="):
        Session(messages=[message])

    assert Session(messages=[TASK, message]).messages == (TASK, message)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"n": 2}, "n= must be 1"),
        ({"messages": []}, "messages="),
        ({"model": "x"}, "model="),
        ({"extra_body": {"session_id": "other"}}, r"session_id.*Session\(id\)"),
        ({"response_format": Verdict}, r"class Verdict; .*Verdict.model_json_schema\(\)"),
    ],
)
def test_options_that_contradict_a_session_are_refused(
    options: Any, reason: str, session: Session
) -> None:
    with pytest.raises((ValueError, TypeError), match=reason):
        session.chat("solver", **options)


def test_an_empty_context_cannot_be_answered(server: FakeServer) -> None:
    session = Session(base_url=server.url)
    with pytest.raises(ValueError, match="append"):
        session.chat("solver")
    session.close()


def test_usage_sums_the_servers_figures_per_role(server: FakeServer) -> None:
    session = Session(base_url=server.url, messages=[TASK], speakers=False)
    session.chat("planner")
    read(session.chat("critic", stream=True))
    session.chat("planner")

    usage = session.usage
    prompts = [call.prompt_tokens for call in session.calls]
    assert [call.role for call in session.calls] == ["planner", "critic", "planner"]
    assert [call.affinity for call in session.calls] == ["new", "hit", "hit"]
    assert usage.calls == 3
    assert usage.prompt_tokens == sum(prompts)
    assert usage.cached_tokens == prompts[0] + prompts[1]
    assert usage.computed_tokens == prompts[2]
    # The planner's decode worker still holds its first prompt; the last token is never handed off.
    received = [prompts[0] - 1, prompts[1] - 1, prompts[2] - 1 - prompts[0]]
    assert usage.handoff_bytes == 1000 * sum(received)
    assert usage.roles["critic"] == RoleUsage(
        calls=1,
        prompt_tokens=prompts[1],
        cached_tokens=prompts[0],
        computed_tokens=prompts[1] - prompts[0],
        handoff_bytes=1000 * received[1],
        completion_tokens=5,
        per_model_prefill_tokens=prompts[1],
    )
    session.close()


def test_only_a_streamed_call_knows_its_time_to_first_token(session: Session) -> None:
    session.chat("planner")
    read(session.chat("planner", stream=True))

    plain, streamed = session.calls
    assert plain.ttft_s is None
    assert streamed.ttft_s is not None
    assert 0 < streamed.ttft_s <= streamed.wall_s


def test_usage_prints_as_a_table(session: Session) -> None:
    session.chat("planner")
    output = io.StringIO()
    Console(width=100, file=output).print(session.usage)

    assert "planner" in output.getvalue()


def test_usage_shows_as_a_table_in_a_notebook(session: Session) -> None:
    session.chat("planner")
    shown = session.usage._repr_mimebundle_()

    assert "planner" in shown["text/html"]
    assert "planner" in shown["text/plain"]


def test_what_sharing_saved_is_what_each_role_would_have_prefilled_for_itself(
    session: Session,
) -> None:
    session.chat("planner")
    session.chat("critic")
    usage = session.usage

    assert usage.per_model_prefill_tokens == usage.prompt_tokens
    assert usage.saved_tokens == usage.prompt_tokens - usage.computed_tokens > 0
    assert usage.roles["planner"].saved_tokens == 0


def test_explain_tells_where_the_servers_prompts_stopped_sharing(
    session: Session, server: FakeServer
) -> None:
    session.append({"role": "user", "content": "It is 10:41."})
    session.chat("planner")
    answer = session.messages[-1]
    edited = [TASK, {"role": "user", "content": "It is 10:42."}, answer]
    with openai.OpenAI(
        base_url=server.url, api_key="k", default_headers={"X-Session-ID": session.id}
    ) as plain:
        plain.chat.completions.create(model="critic", messages=edited)

    report = session.explain()
    [finding] = report.findings
    assert report.session == session.id
    assert report.calls == 2
    assert (finding.call, finding.role, finding.broken.cause) == (1, "critic", "timestamp")


def test_totals_are_the_servers_ledger(session: Session) -> None:
    session.chat("planner")
    session.chat("critic")

    totals = session.totals()
    assert totals.calls == 2
    assert totals.prompt_tokens == session.usage.prompt_tokens
    assert totals.cached_tokens == session.usage.cached_tokens
    assert totals.per_model_prefill_tokens > 0


def test_an_id_is_quoted_in_the_path(server: FakeServer) -> None:
    session = Session("a/b c", base_url=server.url)
    session.close()

    assert server.requests[0].path == "/v1/sessions/a%2Fb%20c"


def test_leaving_the_with_block_does_not_end_the_session(
    session: Session, server: FakeServer
) -> None:
    with session:
        session.chat("planner")
    session.chat("critic")

    assert [call.affinity for call in session.calls] == ["new", "hit"]


def test_a_session_without_a_client_cannot_chat() -> None:
    with pytest.raises(RuntimeError, match="base_url="):
        Session(messages=[TASK]).chat("planner")


def test_a_client_with_a_session_of_its_own_is_refused(server: FakeServer) -> None:
    headers = {"x-session-id": "other"}
    with (
        openai.OpenAI(base_url=server.url, api_key="k", default_headers=headers) as client,
        pytest.raises(ValueError, match="default headers"),
    ):
        Session(client=client)


def test_concurrent_calls_each_add_one_answer(session: Session, server: FakeServer) -> None:
    server.script([f"answer {i}" for i in range(16)])

    def work() -> None:
        for _ in range(4):
            session.chat("solver")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    answers = {item["content"] for item in session.messages[1:]}
    assert answers == {f"answer {i}" for i in range(16)}
    assert session.usage.calls == 16
    for chat in server.chats:
        assert json.dumps(chat.body["messages"][0]) == json.dumps(TASK)
