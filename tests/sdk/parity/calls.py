"""Forty calls that programs make with openai's client, the same for any class of client.

Each takes a client and the server it speaks to and returns what the program sees of it.
"""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Callable
from typing import Any

import openai
from pydantic import BaseModel

from prefillshare_agents.testing import Failure, FakeServer, tool_call

Call = Callable[[openai.OpenAI, FakeServer], Any]

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look up a height.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]


class Reply(BaseModel):
    answer: int


class Lookup(BaseModel):
    place: str


def create(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "planner", "messages": HELLO, **options})


def plain(client: openai.OpenAI, server: FakeServer) -> Any:
    return create(client)


def sampling_options(client: openai.OpenAI, server: FakeServer) -> Any:
    return create(client, temperature=0, top_p=0.5, seed=7, stop=["x"], max_tokens=5, logprobs=True)


def omitted_options(client: openai.OpenAI, server: FakeServer) -> Any:
    return create(client, temperature=openai.NOT_GIVEN, user=openai.omit)


def several_roles(client: openai.OpenAI, server: FakeServer) -> Any:
    return [create(client, model=model) for model in ("planner", "critic")]


def a_long_conversation(client: openai.OpenAI, server: FakeServer) -> Any:
    messages = [*HELLO]
    for _ in range(3):
        answer = create(client, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "and then?"}]
    return create(client, messages=messages)


def streamed(client: openai.OpenAI, server: FakeServer) -> Any:
    return list(create(client, stream=True))


def streamed_with_usage(client: openai.OpenAI, server: FakeServer) -> Any:
    return list(create(client, stream=True, stream_options={"include_usage": True}))


def a_stream_left_early(client: openai.OpenAI, server: FakeServer) -> Any:
    with create(client, stream=True) as stream:
        return next(iter(stream))


def the_stream_helper(client: openai.OpenAI, server: FakeServer) -> Any:
    with client.chat.completions.stream(model="planner", messages=HELLO) as stream:
        events = [(event.type, event.to_dict()) for event in stream]
        return events, stream.get_final_completion()


def the_stream_helper_with_a_schema(client: openai.OpenAI, server: FakeServer) -> Any:
    server.script('{"answer": 4}')
    with client.chat.completions.stream(
        model="planner", messages=HELLO, response_format=Reply
    ) as stream:
        stream.until_done()
        return stream.get_final_completion().choices[0].message.parsed


def parsed(client: openai.OpenAI, server: FakeServer) -> Any:
    server.script('{"answer": 4}')
    answer = client.chat.completions.parse(model="planner", messages=HELLO, response_format=Reply)
    return answer, answer.choices[0].message.parsed


def parsed_but_cut_off(client: openai.OpenAI, server: FakeServer) -> Any:
    server.script({"content": '{"answ', "finish_reason": "length"})
    return client.chat.completions.parse(model="planner", messages=HELLO, response_format=Reply)


def parsed_but_not_json(client: openai.OpenAI, server: FakeServer) -> Any:
    server.script("four")
    return client.chat.completions.parse(model="planner", messages=HELLO, response_format=Reply)


def a_tool_call(client: openai.OpenAI, server: FakeServer) -> Any:
    server.script(tool_call("lookup", place="Rome"))
    return create(client, tools=TOOLS, tool_choice="auto")


def a_streamed_tool_call(client: openai.OpenAI, server: FakeServer) -> Any:
    server.script(tool_call("lookup", place="Rome"))
    return list(create(client, tools=TOOLS, stream=True))


def a_parsed_tool_call(client: openai.OpenAI, server: FakeServer) -> Any:
    server.script(tool_call("Lookup", place="Rome"))
    answer = client.chat.completions.parse(
        model="planner", messages=HELLO, tools=[openai.pydantic_function_tool(Lookup)]
    )
    calls = answer.choices[0].message.tool_calls or []
    return [call.function.parsed_arguments for call in calls]


def a_tool_result_sent_back(client: openai.OpenAI, server: FakeServer) -> Any:
    server.script(tool_call("lookup", place="Rome"))
    asked = create(client, tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "21 m"}
    return create(client, tools=TOOLS, messages=[*HELLO, asked, result])


def a_raw_response(client: openai.OpenAI, server: FakeServer) -> Any:
    raw = client.chat.completions.with_raw_response.create(model="planner", messages=HELLO)
    return raw.status_code, raw.http_version, type(raw).__name__, raw.parse()


def a_raw_stream(client: openai.OpenAI, server: FakeServer) -> Any:
    raw = client.chat.completions.with_raw_response.create(
        model="planner", messages=HELLO, stream=True
    )
    return raw.status_code, list(raw.parse())


def a_streaming_response(client: openai.OpenAI, server: FakeServer) -> Any:
    with client.chat.completions.with_streaming_response.create(
        model="planner", messages=HELLO
    ) as raw:
        return raw.status_code, type(raw).__name__, json.loads(raw.read())["choices"]


def lines_of_a_streaming_response(client: openai.OpenAI, server: FakeServer) -> Any:
    with client.chat.completions.with_streaming_response.create(
        model="planner", messages=HELLO, stream=True
    ) as raw:
        events = [json.loads(line[6:]) for line in raw.iter_lines() if line.startswith("data: {")]
        return [event["choices"] for event in events]


def _status(status: int) -> Call:
    def call(client: openai.OpenAI, server: FakeServer) -> Any:
        server.fail(status, status, status)
        return create(client)

    call.__name__ = f"status_{status}"
    return call


def a_retry_that_helps(client: openai.OpenAI, server: FakeServer) -> Any:
    server.fail(503, 429)
    return create(client)


def a_retry_that_the_server_forbids(client: openai.OpenAI, server: FakeServer) -> Any:
    server.fail(Failure(503, retry=False))
    return create(client)


def a_retry_that_the_server_wants(client: openai.OpenAI, server: FakeServer) -> Any:
    server.fail(Failure(400, retry=True))
    return create(client)


def no_retries(client: openai.OpenAI, server: FakeServer) -> Any:
    server.fail(503)
    return create(client.with_options(max_retries=0))


def a_timeout(client: openai.OpenAI, server: FakeServer) -> Any:
    never = threading.Event()
    server.delay(never)
    try:
        return create(client.with_options(timeout=0.2, max_retries=0))
    finally:
        server.wait_for_chats(1, 60)
        never.set()


def nobody_listens(client: openai.OpenAI, server: FakeServer) -> Any:
    return create(client.with_options(base_url="http://127.0.0.1:9/v1", max_retries=0))


def a_stream_that_ends_early(client: openai.OpenAI, server: FakeServer) -> Any:
    server.cut_stream(after=2)
    return list(create(client, stream=True))


def a_stream_that_ends_in_an_error(client: openai.OpenAI, server: FakeServer) -> Any:
    server.cut_stream(after=2, how="error")
    return list(create(client, stream=True))


def a_stream_whose_connection_breaks(client: openai.OpenAI, server: FakeServer) -> Any:
    server.cut_stream(after=2, how="reset")
    return list(create(client, stream=True))


def extras_of_a_request(client: openai.OpenAI, server: FakeServer) -> Any:
    return create(
        client,
        extra_headers={"X-Trace": "1"},
        extra_query={"debug": "yes"},
        extra_body={"min_p": 0.1},
    )


def default_headers(client: openai.OpenAI, server: FakeServer) -> Any:
    return create(client.with_options(default_headers={"X-Team": "a"}, default_query={"q": "1"}))


def other_endpoints(client: openai.OpenAI, server: FakeServer) -> Any:
    return list(client.models.list())


def a_missing_endpoint(client: openai.OpenAI, server: FakeServer) -> Any:
    return client.embeddings.create(model="planner", input="hello")


def responses_where_there_are_none(client: openai.OpenAI, server: FakeServer) -> Any:
    return client.responses.create(model="planner", input="hello")


def an_untyped_post(client: openai.OpenAI, server: FakeServer) -> Any:
    body = {"model": "planner", "messages": HELLO}
    return client.post("/chat/completions", body=body, cast_to=object)


def what_a_copy_keeps(client: openai.OpenAI, server: FakeServer) -> Any:
    twin = client.copy(timeout=70, max_retries=5)
    assert type(twin) is type(client)
    return twin.timeout, twin.max_retries, str(twin.base_url), twin.api_key, create(twin)


def pickling(client: openai.OpenAI, server: FakeServer) -> Any:
    try:
        return pickle.dumps(client)
    except (TypeError, pickle.PicklingError, AttributeError):
        return "refused"  # because of the first part that cannot be pickled, whichever that is


def a_shallow_copy(client: openai.OpenAI, server: FakeServer) -> Any:
    return create(copy.copy(client))


def a_closed_client(client: openai.OpenAI, server: FakeServer) -> Any:
    with client.copy(http_client=openai.DefaultHttpxClient()) as twin:
        answer = create(twin)
    return answer, twin.is_closed(), create(twin)


CALLS: list[Call] = [
    plain,
    sampling_options,
    omitted_options,
    several_roles,
    a_long_conversation,
    streamed,
    streamed_with_usage,
    a_stream_left_early,
    the_stream_helper,
    the_stream_helper_with_a_schema,
    parsed,
    parsed_but_cut_off,
    parsed_but_not_json,
    a_tool_call,
    a_streamed_tool_call,
    a_parsed_tool_call,
    a_tool_result_sent_back,
    a_raw_response,
    a_raw_stream,
    a_streaming_response,
    lines_of_a_streaming_response,
    *map(_status, (400, 401, 403, 404, 409, 413, 422, 429, 500, 503)),
    a_retry_that_helps,
    a_retry_that_the_server_forbids,
    a_retry_that_the_server_wants,
    no_retries,
    a_timeout,
    nobody_listens,
    a_stream_that_ends_early,
    a_stream_that_ends_in_an_error,
    a_stream_whose_connection_breaks,
    extras_of_a_request,
    default_headers,
    other_endpoints,
    a_missing_endpoint,
    responses_where_there_are_none,
    an_untyped_post,
    what_a_copy_keeps,
    pickling,
    a_shallow_copy,
    a_closed_client,
]
