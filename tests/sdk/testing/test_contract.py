"""What the fake server counts. That its answers look as the router's is tested in tests/router."""

from typing import Any

import httpx
import openai
import pytest

from prefillshare_agents.testing import FakeServer

from .conftest import Ask

TASK = {"role": "user", "content": "How far is the moon from the earth?"}
PLAN = {"role": "system", "content": "Plan."}
GROWN = [TASK, {"role": "assistant", "content": "Measure it with light."}]
TOOL: Any = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}


def post(server: FakeServer, path: str, body: Any, **headers: str) -> Any:
    url = f"http://127.0.0.1:{server.port}{path}"
    return httpx.post(url, json=body, headers=headers, timeout=60)


def get(server: FakeServer, path: str) -> Any:
    return httpx.get(f"http://127.0.0.1:{server.port}{path}", timeout=60).json()


@pytest.mark.parametrize(
    ("headers", "fields", "session"),
    [
        ({"x-session-id": "a", "x-prefillshare-session": "b"}, {}, "a"),
        ({"x-prefillshare-session": "b"}, {"session_id": "c"}, "b"),
        ({"x-session-affinity": "d"}, {"session_id": "c"}, "c"),
        ({"x-session-affinity": "d"}, {"prompt_cache_key": "e"}, "d"),
        ({}, {"prompt_cache_key": "e", "metadata": {"session_id": "f"}}, "e"),
        ({}, {"metadata": {"session_id": "f"}}, "f"),
        ({}, {"user": "g"}, None),
    ],
)
def test_the_first_spelling_that_is_present_names_the_session(
    headers: dict[str, str], fields: Any, session: str | None, server: FakeServer
) -> None:
    body = {"model": "planner", "messages": [TASK], **fields}
    answer = post(server, "/v1/chat/completions", body, **headers).json()

    assert answer["prefillshare"]["session"] == server.chats[0].session == session
    assert server.chats[0].role == "planner"


@pytest.mark.parametrize("server", [{"roles": ["critic", "planner"]}], indirect=True)
def test_an_unknown_role_is_told_the_roles(ask: Ask) -> None:
    with pytest.raises(openai.NotFoundError, match="roles of this cluster: critic, planner"):
        ask("writer")


def test_models_are_the_roles_that_were_called(server: FakeServer, ask: Ask) -> None:
    ask("planner")

    assert [card["id"] for card in get(server, "/v1/models")["data"]] == ["planner", "base"]


@pytest.mark.parametrize("server", [{"max_model_len": 20}], indirect=True)
def test_a_prompt_that_is_too_long_names_both_numbers(server: FakeServer, ask: Ask) -> None:
    ask(messages=[TASK], max_tokens=3)
    with pytest.raises(openai.BadRequestError, match=r"17 tokens and at least 4 .* holds 20") as e:
        ask(messages=[TASK], max_tokens=4)

    assert e.value.code == "context_length_exceeded"
    assert server.sessions["s1"]["calls"] == 1


@pytest.mark.parametrize("server", [{"max_model_len": 20}], indirect=True)
def test_a_refused_call_takes_no_answer_of_the_script(server: FakeServer, ask: Ask) -> None:
    server.script(["kept"])
    with pytest.raises(openai.BadRequestError):
        ask(messages=[TASK], max_tokens=4)

    assert ask(messages=[TASK]).choices[0].message.content == "kept"


def test_tokenize_counts_what_a_call_has(server: FakeServer, ask: Ask) -> None:
    messages = [PLAN, TASK]
    body = {"model": "planner", "messages": messages, "tools": [TOOL]}
    counted = post(server, "/tokenize", body).json()

    assert counted["count"] == len(counted["tokens"])
    assert counted["count"] == ask(messages=messages, tools=[TOOL]).usage.prompt_tokens
    assert "s1" in server.sessions


def test_a_prefill_ahead_is_found_cached(server: FakeServer, ask: Ask) -> None:
    ahead = post(server, "/v1/sessions/s1/prefill", {"messages": [TASK], "wait": True}).json()
    call = ask(messages=[PLAN, TASK])

    assert ahead["computed_tokens"] == ahead["prompt_tokens"] == 14
    assert call.prefillshare["affinity"] == "hit"
    assert call.prefillshare["cached_tokens"] == 14
    assert server.sessions["s1"]["computed_tokens"] == call.usage.prompt_tokens
    assert server.sessions["s1"]["prefills_ahead"] == 1
    server.assert_shared(1.0)


def test_totals_are_the_sums_of_the_calls(server: FakeServer, ask: Ask) -> None:
    answers = [ask("planner", [PLAN, TASK]), ask("critic", GROWN), ask("planner", [PLAN, *GROWN])]
    totals = server.sessions["s1"]

    assert totals == get(server, "/v1/sessions/s1")
    assert totals["calls"] == 3
    assert totals["prompt_tokens"] == sum(answer.usage.prompt_tokens for answer in answers)
    assert totals["generated_tokens"] == sum(answer.usage.completion_tokens for answer in answers)
    for name in ("cached_tokens", "computed_tokens", "handoff_bytes", "per_model_prefill_tokens"):
        assert totals[name] == sum(answer.prefillshare[name] for answer in answers)
    assert totals["roles"] == ["planner", "critic"]


def test_one_prefill_for_each_role_would_read_every_context_anew(ask: Ask) -> None:
    shared = [ask(role, [TASK]) for role in ("planner", "critic")]
    again = ask("critic", GROWN)

    assert [answer.prefillshare["per_model_prefill_tokens"] for answer in shared] == [17, 17]
    # The answer that is new to it, but neither its first context nor its tail.
    assert again.prefillshare["per_model_prefill_tokens"] == 10


def test_what_other_sessions_left_in_the_cache_saves_nothing(server: FakeServer, ask: Ask) -> None:
    for session in ("cold", "warm"):
        for role in ("planner", "critic"):
            ask(role, [PLAN, TASK], session=session)
    cold, warm = server.sessions["cold"], server.sessions["warm"]

    assert cold["per_model_prefill_tokens"] > cold["computed_tokens"]
    assert warm["per_model_prefill_tokens"] == warm["computed_tokens"]


def test_a_child_goes_on_from_what_its_parent_read(server: FakeServer, ask: Ask) -> None:
    ask("planner", [PLAN, TASK])
    child = ask(
        "planner", [PLAN, TASK], session="s2", headers={"X-Parent-Session-ID": "s1"}
    ).prefillshare

    assert child["per_model_prefill_tokens"] == 0


def test_prompts_share_what_their_session_sent_before_whatever_is_cached(
    server: FakeServer, ask: Ask
) -> None:
    for session in ("cold", "warm"):
        ask("planner", [TASK], session=session)
        ask("critic", [TASK], session=session)
        calls = get(server, f"/v1/sessions/{session}/calls")["data"]
        assert [call["shared_tokens"] for call in calls] == [0, calls[1]["prompt_tokens"]]
        assert calls[0]["cached_tokens"] == (0 if session == "cold" else 16)


def test_the_calls_of_a_session_are_listed(server: FakeServer, ask: Ask) -> None:
    ask("planner", [PLAN, TASK])
    ask("critic", GROWN)
    first, second = get(server, "/v1/sessions/s1/calls")["data"]

    assert [first["index"], second["index"]] == [0, 1]
    assert [first["role"], second["role"]] == ["planner", "critic"]
    assert first["context_tokens"] == 14
    assert second["break"] is None


def test_a_break_is_told_before_the_first_token(server: FakeServer, ask: Ask) -> None:
    ask(messages=GROWN)
    body = {"model": "planner", "messages": GROWN[1:], "stream": True}
    answer = post(server, "/v1/chat/completions", body, **{"x-session-id": "s1"})

    told = httpx.Response(200, text=answer.headers["x-prefillshare-break"]).json()
    assert told["cause"] == "history_trimmed"
    assert told["token_index"] == 1
    assert told["lost_tokens"] == 23


def test_a_strict_call_that_breaks_is_refused_and_not_counted(server: FakeServer, ask: Ask) -> None:
    ask(messages=GROWN)
    server.script(["kept"])
    with pytest.raises(openai.UnprocessableEntityError, match="do not go on") as refused:
        ask(messages=GROWN[1:], headers={"X-PrefillShare-Strict": "true"})

    assert refused.value.code == "prefix_break"
    assert server.sessions["s1"]["calls"] == 1
    assert ask(messages=GROWN).choices[0].message.content == "kept"


def test_names_of_speakers_stay_out_of_the_context(server: FakeServer, ask: Ask) -> None:
    ask("planner", [TASK])
    named = {"role": "assistant", "content": "Measure it.", "name": "planner"}
    ask("critic", [TASK, named])

    context, tail = server.rendered(1).split("<|im_start|>system\n")
    assert "planner" not in context
    assert tail.startswith("Assistant messages so far: 1 planner.<|im_end|>")


def test_every_header_line_is_kept(server: FakeServer) -> None:
    headers = [("X-Session-ID", "a"), ("X-Session-ID", "b")]
    body = {"model": "planner", "messages": [TASK]}
    url = f"{server.url}/chat/completions"
    httpx.post(url, json=body, headers=headers, timeout=60)

    assert server.chats[0].sessions == ["a", "b"]
    assert server.chats[0].header("Content-Type") == "application/json"


def test_a_chat_without_messages_has_no_prompt(server: FakeServer) -> None:
    post(server, "/v1/chat/completions", {"model": "planner"})

    with pytest.raises(ValueError, match="chat 0 was refused and has no prompt: messages must be"):
        server.rendered(0)


def test_a_decode_worker_reuses_nothing_of_another_salt(server: FakeServer) -> None:
    def reused(**fields: Any) -> int:
        body = {"model": "planner", "messages": [TASK], **fields}
        answer = post(server, "/v1/chat/completions", body).json()
        return int(answer["prefillshare"]["base_tokens_reused"])

    assert [reused() > 0, reused() > 0] == [False, True]
    assert [reused(cache_salt="x") > 0, reused(cache_salt="x") > 0] == [False, True]
