"""Tool-call turns come back as they were generated."""

import json
from typing import Any

from prefillshare_server.router.turns import KEPT_TURNS, ToolCall, Turns

RAW = '<tool_call>\n{"name":"weather","arguments":{"city":"Z\\u00fcrich","day":1.0}}\n</tool_call>'
CALL = ToolCall("call-1", "weather", '{"city": "Zürich", "day": 1.0}')


def message(arguments: object = CALL.arguments, **changes: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "call-1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call], **changes}


def kept() -> Turns:
    turns = Turns()
    turns.keep(RAW, "", [CALL])
    return turns


def test_the_generated_text_takes_the_place_of_the_tool_calls() -> None:
    assert kept().restored(message()) == {"role": "assistant", "content": RAW}


def test_other_ways_to_write_the_same_arguments_are_the_same_call() -> None:
    for arguments in ['{"day":1.0,"city":"Z\\u00fcrich"}', {"city": "Zürich", "day": 1.0}]:
        assert kept().restored(message(arguments))["content"] == RAW


def test_a_turn_the_client_edited_is_left_as_it_is() -> None:
    edits = [
        message(json.dumps({"city": "Bern", "day": 1.0})),
        message("no json"),
        message("[" * 100_000 + "]" * 100_000),
        message(content="And I say this."),
        message(tool_calls=[*message()["tool_calls"], *message()["tool_calls"]]),
    ]
    for edited in edits:
        assert kept().restored(edited) == edited


def test_an_unknown_call_is_left_as_it_is() -> None:
    foreign = message()
    foreign["tool_calls"][0]["id"] = "call-2"
    assert kept().restored(foreign) == foreign


def test_a_malformed_message_is_left_for_others_to_refuse() -> None:
    for calls in ("text", [5], [{"id": "call-1"}], [{"id": "call-1", "function": 3}]):
        odd = message(tool_calls=calls)
        assert kept().restored(odd) == odd


def test_arguments_alone_do_not_stand_for_a_call() -> None:
    """A grammar for a named tool may leave the name out; the next reader needs it."""
    turns = Turns()
    turns.keep('{"city": "Zürich"}', "", [ToolCall("call-1", "weather", '{"city": "Zürich"}')])
    assert turns.restored(message('{"city": "Zürich"}')) == message('{"city": "Zürich"}')


def test_the_oldest_turns_are_forgotten() -> None:
    turns = kept()
    for number in range(KEPT_TURNS):
        turns.keep("f()", "", [ToolCall(f"later-{number}", "f", "{}")])
    assert turns.restored(message()) == message()
