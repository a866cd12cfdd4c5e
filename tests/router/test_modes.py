"""What headers switch: strict sessions, and roles that share nothing."""

import json
from typing import Any

import pytest

from tests.router.conftest import Bench

SESSION = {"X-Session-ID": "s"}
STRICT = {**SESSION, "X-PrefillShare-Strict": "true"}
ISOLATED = {**SESSION, "X-PrefillShare-Mode": "isolate"}
QUESTION = "another question about numbers and then some words " * 4
REST = [{"role": "assistant", "content": "an answer"}, {"role": "user", "content": "more"}]
TALK = {"model": "alpha", "messages": [{"role": "user", "content": QUESTION}, *REST]}
EDITED = {"model": "alpha", "messages": [{"role": "user", "content": "the weather"}, *REST]}


async def test_a_strict_call_that_breaks_the_prefix_is_refused_before_anything_is_computed(
    bench: Bench,
) -> None:
    await bench.post("/v1/chat/completions", TALK, STRICT)
    for _ in range(2):  # What was refused is not known afterwards.
        status, body, headers = await bench.post("/v1/chat/completions", EDITED, STRICT)
        assert (status, body["error"]["code"]) == (422, "prefix_break")
        assert body["error"]["param"] == "messages"
        assert headers["x-should-retry"] == "false"
        assert json.loads(headers["X-PrefillShare-Break"])["cause"] == "message_edited"
    assert len(bench.prefill[0].requests) == 1
    assert (await bench.get("/v1/sessions/s"))[1]["calls"] == 1
    assert await bench.metric('prefillshare_prefix_breaks_total{cause="message_edited"') == 2


async def test_a_strict_stream_that_breaks_is_refused_with_a_status(bench: Bench) -> None:
    await bench.post("/v1/chat/completions", TALK, STRICT)
    streamed = {**EDITED, "stream": True}
    assert (await bench.post("/v1/chat/completions", streamed, STRICT))[0] == 422


async def test_another_task_is_served_although_the_session_is_strict(bench: Bench) -> None:
    await bench.chat(QUESTION, headers=STRICT)
    status, answer, _ = await bench.chat("the weather", headers=STRICT)
    assert status == 200
    assert answer["prefillshare"]["break"]["cause"] == "unrelated"
    assert await bench.metric('prefillshare_prefix_breaks_total{cause="unrelated"') == 1


async def test_a_strict_call_that_goes_on_is_served(bench: Bench) -> None:
    _, answer, _ = await bench.chat(QUESTION, headers=STRICT)
    said = answer["choices"][0]["message"]
    messages = [{"role": "user", "content": QUESTION}, said, {"role": "user", "content": "more"}]
    body = {"model": "beta", "messages": messages}
    assert (await bench.post("/v1/chat/completions", body, STRICT))[0] == 200


async def test_isolated_roles_find_only_their_own_blocks(bench: Bench) -> None:
    reports = []
    for role in ("alpha", "beta", "alpha"):
        _, answer, _ = await bench.chat(QUESTION, model=role, headers=ISOLATED)
        reports.append(answer["prefillshare"])
    assert [report["cached_tokens"] for report in reports[:2]] == [0, 0]
    assert reports[2]["cached_tokens"] > 0
    totals = (await bench.get("/v1/sessions/s"))[1]
    assert totals["cached_tokens"] == reports[2]["cached_tokens"]
    salts = [body["cache_salt"] for body in bench.prefill[0].requests]
    assert len(set(salts)) == 2
    at_decode = [worker.requests[0]["cache_salt"] for worker in bench.decode.values()]
    assert at_decode == salts[:2]


async def test_isolated_sessions_share_nothing_either(bench: Bench) -> None:
    for session in ("s", "t"):
        headers = {**ISOLATED, "X-Session-ID": session}
        _, answer, _ = await bench.chat(QUESTION, headers=headers)
        assert answer["prefillshare"]["cached_tokens"] == 0


async def test_a_clients_own_salt_still_counts_where_roles_are_isolated(bench: Bench) -> None:
    for salt in ("tenant-1", "tenant-2"):
        _, answer, _ = await bench.chat(QUESTION, headers=ISOLATED, cache_salt=salt)
        assert answer["prefillshare"]["cached_tokens"] == 0


async def test_sharing_is_the_default_and_can_be_named(bench: Bench) -> None:
    await bench.chat(QUESTION)
    headers = {"X-PrefillShare-Mode": "share"}
    _, answer, _ = await bench.chat(QUESTION, model="beta", headers=headers)
    assert answer["prefillshare"]["cached_tokens"] > 0
    assert "cache_salt" not in bench.prefill[0].requests[0]


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({"X-PrefillShare-Mode": "alone"}, {}, "x-prefillshare-mode"),
        ({"X-PrefillShare-Strict": "maybe"}, {}, "x-prefillshare-strict"),
        (ISOLATED, {"cache_salt": ""}, "cache_salt"),
        (ISOLATED, {"cache_salt": 7}, "cache_salt"),
    ],
)
async def test_another_word_is_a_400(
    bench: Bench, headers: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    status, body, _ = await bench.chat(headers=headers, **fields)
    assert (status, body["error"]["param"]) == (400, param)
    assert not bench.prefill[0].requests
