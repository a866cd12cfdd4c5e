"""What goes out and what comes back: reasoning, structured answers, tools, ids."""

from collections.abc import Iterator
from typing import Any, TypedDict

import pytest
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, ValidationError

from prefillshare_agents.langgraph import ChatPrefillShare
from prefillshare_agents.testing import FakeServer

UUID = "0b5f24c2-9a3e-4f9b-8a53-6c1d0e1f2a3b"


class Verdict(BaseModel):
    """What the critic says."""

    right: bool


class VerdictDict(TypedDict):
    """What the critic says."""

    right: bool


def search(name: str) -> str:
    """Look something up."""
    return name


@pytest.fixture
def model(server: FakeServer) -> Iterator[ChatPrefillShare]:
    made = ChatPrefillShare(model="critic", base_url=server.url)
    yield made
    # Left to the garbage collector, its socket may be found unclosed before the client is.
    made.root_client.close()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("output_version", [None, "v1"])
def test_reasoning_comes_in_and_goes_back(
    streamed: bool, output_version: Any, server: FakeServer
) -> None:
    model = ChatPrefillShare(model="critic", base_url=server.url, output_version=output_version)
    server.script([{"reasoning": "Ninety-one is 7 times 13.", "content": "No."}])
    pieces: list[Any] = list(model.stream("Is 91 prime?")) if streamed else []
    answer = sum(pieces[1:], pieces[0]) if streamed else model.invoke("Is 91 prime?")
    model.invoke([HumanMessage("Is 91 prime?"), answer, HumanMessage("Sure?")])

    assert answer.additional_kwargs["reasoning_content"] == "Ninety-one is 7 times 13."
    assert answer.text == "No."
    sent = server.chats[1].body["messages"][1]
    assert (sent["reasoning"], sent["content"]) == ("Ninety-one is 7 times 13.", "No.")


@pytest.mark.parametrize("schema", [Verdict, VerdictDict, Verdict.model_json_schema()])
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_structured_output_by_every_method(
    method: Any, schema: Any, model: ChatPrefillShare, server: FakeServer
) -> None:
    calls = {"tool_calls": [{"name": "Verdict", "arguments": {"right": True}}]}
    if schema is VerdictDict:
        calls = {"tool_calls": [{"name": "VerdictDict", "arguments": {"right": True}}]}
    server.script([calls if method == "function_calling" else '{"right": true}'] * 4)
    structured: Any = model.with_structured_output(schema, method=method)
    answers = [structured.invoke("hello"), list(structured.stream("hello"))[-1]]
    answers += [await structured.ainvoke("hello")]
    answers += [[part async for part in structured.astream("hello")][-1]]
    await model.root_async_client.close()

    expected = Verdict(right=True) if schema is Verdict else {"right": True}
    assert answers == [expected] * 4
    body = server.chats[0].body
    if method == "function_calling":
        assert body["tool_choice"]["function"]["name"] == body["tools"][0]["function"]["name"]
    else:
        kind = "json_schema" if method == "json_schema" else "json_object"
        assert body["response_format"]["type"] == kind


@pytest.mark.parametrize("text", ['{"right": tr', '{"right": "maybe"}'])
def test_an_answer_that_is_no_object_of_the_schema_is_not_lost(
    text: str, model: ChatPrefillShare, server: FakeServer
) -> None:
    server.script([{"content": text, "finish_reason": "length"}] * 2)
    kept: Any = model.with_structured_output(Verdict, include_raw=True).invoke("hello")
    assert kept["raw"].text == text
    assert kept["parsing_error"] is not None
    with pytest.raises((ValueError, ValidationError)):
        model.with_structured_output(Verdict).invoke("hello")


def test_every_form_of_tool_can_be_bound_in_one_order(
    model: ChatPrefillShare, server: FakeServer
) -> None:
    plain = {"name": "adder", "description": "Add.", "parameters": {"type": "object"}}
    forms: list[Any] = [search, tool("lookup")(search), Verdict, plain]
    for tools in (forms, forms[::-1]):
        model.bind_tools(tools, tool_choice="any", strict=True, parallel_tool_calls=False).invoke(
            "hello"
        )

    first, second = (chat.body for chat in server.chats)
    names = [item["function"]["name"] for item in first["tools"]]
    assert names == ["Verdict", "adder", "lookup", "search"]
    assert first == second
    assert first["tool_choice"] == "required"
    assert first["parallel_tool_calls"] is False
    assert all(item["function"]["strict"] for item in first["tools"])


def test_an_invalid_tool_call_goes_back_where_and_as_it_was(
    model: ChatPrefillShare, server: FakeServer
) -> None:
    calls = [
        {"id": "c1", "name": "search", "arguments": '{"name": '},
        {"id": "c2", "name": "search", "arguments": '{"name":"moon"}'},
    ]
    server.script([{"tool_calls": calls}])
    answer = model.bind_tools([search]).invoke("hello")
    results = [ToolMessage("no JSON", tool_call_id="c1"), ToolMessage("moon", tool_call_id="c2")]
    model.invoke([HumanMessage("hello"), answer, *results])

    assert [call["id"] for call in answer.invalid_tool_calls] == ["c1"]
    sent = server.chats[1].body["messages"][1]["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in sent] == [
        (call["id"], call["arguments"]) for call in calls
    ]


def handoff(call_id: str) -> list[Any]:
    call = {"name": "transfer_back", "args": {}, "id": call_id}
    return [
        AIMessage("Transferring back", tool_calls=[call]),
        ToolMessage("Transferred", tool_call_id=call_id),
    ]


def test_random_ids_that_no_model_gave_are_settled(
    model: ChatPrefillShare, server: FakeServer
) -> None:
    for call_id in (UUID, UUID[::-1].replace("-", "")):
        model.invoke([SystemMessage("Mine."), HumanMessage("hello"), *handoff(call_id)])
    model.invoke([HumanMessage("hello"), *handoff(UUID)])

    sent = [chat.body["messages"][-2:] for chat in server.chats]
    assert sent[0] == sent[1] == sent[2]
    assert sent[0][0]["tool_calls"][0]["id"] == sent[0][1]["tool_call_id"]


@pytest.mark.parametrize("call_id", ["call_abc", "chatcmpl-tool-0b5f24c29a3e4f9b8a536c1d0e1f2a3b"])
def test_ids_that_a_server_gave_are_left_alone(
    call_id: str, model: ChatPrefillShare, server: FakeServer
) -> None:
    model.invoke([HumanMessage("hello"), *handoff(call_id)])

    assert server.chats[0].body["messages"][1]["tool_calls"][0]["id"] == call_id


def test_a_generated_id_is_left_alone_also_if_it_is_a_uuid(
    model: ChatPrefillShare, server: FakeServer
) -> None:
    server.script([{"tool_calls": [{"id": UUID, "name": "search", "arguments": "{}"}]}])
    answer = model.bind_tools([search]).invoke("hello")
    model.invoke([HumanMessage("hello"), answer, ToolMessage("x", tool_call_id=UUID)])

    assert server.chats[1].body["messages"][1]["tool_calls"][0]["id"] == UUID


@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")
def test_a_model_can_be_written_down_and_loaded(server: FakeServer) -> None:
    model = ChatPrefillShare(model="critic", base_url=server.url, temperature=0)
    ours: dict[str, Any] = {
        "allowed_objects": [ChatPrefillShare],
        "valid_namespaces": ["prefillshare_agents"],
    }
    loaded = loads(dumps(model), **ours)

    assert isinstance(loaded, ChatPrefillShare)
    assert (loaded.model_name, loaded.temperature) == ("critic", 0)


RESPONSES_API: list[tuple[dict[str, Any], str]] = [
    ({"use_responses_api": True}, "use_responses_api is True; leave it out"),
    ({"output_version": "responses/v1"}, "output_version is 'responses/v1'; give 'v1'"),
    ({"reasoning": {"effort": "low"}}, "give reasoning_effort='low' instead"),
    ({"include": ["reasoning.encrypted_content"]}, "include is .*; leave it out"),
    ({"truncation": "auto"}, "truncation is 'auto'; leave it out"),
    ({"use_previous_response_id": True}, "use_previous_response_id is True; leave it out"),
]


@pytest.mark.parametrize(("options", "message"), RESPONSES_API, ids=str)
def test_options_of_the_responses_api_are_refused(
    options: Any, message: str, server: FakeServer
) -> None:
    with pytest.raises(ValueError, match=message):
        ChatPrefillShare(model="critic", base_url=server.url, **options)


@pytest.mark.parametrize(
    "options", [{"reasoning": {"effort": "low"}}, {"previous_response_id": "r1"}], ids=str
)
def test_options_of_the_responses_api_are_refused_in_a_call(
    options: Any, model: ChatPrefillShare, server: FakeServer
) -> None:
    for called in (model.bind(**options), model.with_structured_output(Verdict, **options)):
        with pytest.raises(ValueError, match="sessions need chat completions"):
            called.invoke("hello")
    assert server.chats == []
