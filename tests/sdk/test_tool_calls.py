"""Tool calls in a session's context, and answers that openai's `.parse()` has read."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from prefillshare_agents import OpenAI, Session
from prefillshare_agents.testing import FakeServer

TASK: Any = {"role": "user", "content": "How far is the moon?"}
ARGUMENTS = '{ "name":  "moon"}'
TOOL_CALL: Any = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "lookup", "arguments": ARGUMENTS},
}


class Lookup(BaseModel):
    name: str


@pytest.fixture
def session(server: FakeServer) -> Iterator[Session]:
    made = Session("s1", base_url=server.url, messages=[TASK])
    yield made
    made.close()


def test_a_tool_call_is_answered_once(session: Session) -> None:
    session.append({"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]})
    result = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
    session.append(result)

    with pytest.raises(ValueError, match="no open tool call"):
        session.append(result)


def test_a_context_with_open_tool_calls_cannot_be_answered(
    session: Session, server: FakeServer
) -> None:
    session.append({"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]})
    with pytest.raises(ValueError, match=r"call_1.*append\(\.\.\.\) the tool results first"):
        session.chat("solver")
    assert server.chats == []

    session.append({"role": "tool", "tool_call_id": "call_1", "content": "384,400 km"})
    session.chat("solver")
    assert len(server.chats) == 1


@pytest.mark.parametrize("dumped", [False, True])
def test_a_parsed_answer_joins_as_generated(
    dumped: bool, session: Session, server: FakeServer
) -> None:
    content = '{ "name": "moon"}'
    server.script([{"content": content}])
    with OpenAI(base_url=server.url, api_key="local") as client:
        completion = client.chat.completions.parse(
            model="solver", messages=[TASK], response_format=Lookup
        )
    message = completion.choices[0].message
    assert message.parsed == Lookup(name="moon")
    session.append(message.model_dump(exclude_none=True, warnings=False) if dumped else message)

    assert session.messages[1] == {"role": "assistant", "content": content}


@pytest.mark.parametrize("dumped", [False, True])
def test_parsed_tool_calls_join_as_generated(
    dumped: bool, session: Session, server: FakeServer
) -> None:
    server.script([{"tool_calls": [TOOL_CALL]}])
    tool = openai.pydantic_function_tool(Lookup, name="lookup")
    with OpenAI(base_url=server.url, api_key="local") as client:
        completion = client.chat.completions.parse(model="solver", messages=[TASK], tools=[tool])
    message = completion.choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == Lookup(name="moon")
    session.append(
        {"content": None, **message.model_dump(exclude_none=True, warnings=False)}
        if dumped
        else message
    )

    assert session.messages[1] == {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
