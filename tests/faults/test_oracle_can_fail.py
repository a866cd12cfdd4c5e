"""The kit reports what it is there for: each way to go wrong silently is tried once."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.bench import Bench, Shape, running
from tests.faults.client import Leave, Outcome, request
from tests.faults.oracle import Truth, judged
from tests.faults.pair import Pair, pair
from tests.faults.play import Report, called, made
from tests.faults.rules import Happenings
from tests.faults.scenario import TOOLS, CallPlan
from tests.faults.virtual_time import run
from tests.mocks.mock_pair_faults import Fault
from tests.mocks.mock_pair_language import Asked, expected_tokens

pytestmark = pytest.mark.faults

QUESTION = {"role": "user", "content": "a question about the weather in Paris and so on #1"}


async def reported(
    base_dir: Path,
    prepare: Callable[[Bench], None] = lambda bench: None,
    *,
    turns: int = 1,
    **fields: Any,
) -> tuple[Report, list[str]]:
    """Calls of one session on prepared workers: their report, and the ledger's violations."""
    report = Report()
    async with running(base_dir, Shape()) as bench:
        prepare(bench)
        messages: list[Any] = [QUESTION]
        for number in range(1, turns + 1):
            body = {"model": "alpha", "return_token_ids": True, **fields}
            plan = CallPlan(1, "alpha", "chat", body, "")
            asked = made(bench, plan, messages, messages)
            bench.cluster.prompts.clear()
            verdict = await called(bench, Happenings(bench), asked, report, plan, "s")
            if verdict.choices:
                said = verdict.choices[0].fields.content
                messages = [*messages, {"role": "assistant", "content": said}]
                messages.append({"role": "user", "content": f"and then {number} #1"})
        report.leaked = await bench.leaks()
        return report, bench.cluster.violations


def test_a_right_cluster_gives_no_cause(base_dir: Path) -> None:
    report, violations = run(reported(base_dir, turns=3))
    assert report.answered == 3
    assert not report.failed
    assert not violations


def test_prompt_kv_by_the_decoder_is_seen_in_the_tokens_and_in_the_ledger(base_dir: Path) -> None:
    def prepare(bench: Bench) -> None:
        bench.decode["alpha-0"].computes_prompts = True

    report, violations = run(reported(base_dir, prepare))
    assert "token ids" in report.wrong[0]
    assert "alpha KV at position 0" in violations[0]


def test_a_decoders_own_kv_in_its_prefix_cache_is_seen(base_dir: Path) -> None:
    def prepare(bench: Bench) -> None:
        bench.decode["alpha-0"].guards.cache_base_only = False

    report, violations = run(reported(base_dir, prepare, turns=3))
    assert report.answered == 3, "the answers look well"
    assert "token ids" in report.wrong[0]
    assert "alpha KV" in violations[0]


def test_a_read_after_the_leases_end_is_seen(base_dir: Path) -> None:
    def prepare(bench: Bench) -> None:
        worker = bench.decode["alpha-0"]
        worker.guards.lease = worker.guards.heartbeats = False
        worker.queue_s = 1.0
        expire = bench.cluster.clock.advance
        asyncio.get_running_loop().call_later(0.5, expire, bench.cluster.lease_s + 1)

    report, violations = run(reported(base_dir, prepare))
    assert "token ids" in report.wrong[0]
    assert violations[0].endswith("without a lease")
    assert "garbage KV" in violations[1]


def test_a_read_from_a_restarted_engine_is_seen(base_dir: Path) -> None:
    def prepare(bench: Bench) -> None:
        bench.prefill[0].plan.add(Fault("kill_after_answer", down_s=0.1))
        bench.decode["alpha-0"].guards.engine_id = False
        bench.decode["alpha-0"].wire_s = 1.0

    report, violations = run(reported(base_dir, prepare))
    assert "token ids" in report.wrong[0]
    assert violations[0].endswith("that is gone")


def test_a_lease_that_nobody_gives_back_is_seen(base_dir: Path) -> None:
    def prepare(bench: Bench) -> None:
        bench.prefill[0].keeps_leases = True
        bench.decode["alpha-0"].plan.add(Fault("refuse_lease"))

    report, _ = run(reported(base_dir, prepare))
    assert any("leases" in leak for leak in report.leaked)


@pytest.mark.parametrize("resume", ["generated_ids", "prompt and answer on the base"])
def test_an_answer_resumed_over_the_bases_kv_of_itself_is_seen(base_dir: Path, resume: str) -> None:
    async def body(pair: Pair) -> None:
        ids = pair.prompt()
        true, _ = expected_tokens(pair.cluster.words, "alpha", ids, Asked.of({}))
        pair.decode.plan.add(Fault("preempted", after=2))
        _, first = await pair.decoded(await pair.prefilled(ids, "1"), ids, request_id="1")
        begun = first["choices"][0]["token_ids"]
        assert begun == true[:2]
        if resume == "generated_ids":
            params = await pair.prefilled(ids, "2")
            _, answer = await pair.decoded(params, ids, begun, request_id="2")
            said = answer["choices"][0]["token_ids"]
        else:
            params = await pair.prefilled([*ids, *begun], "2")
            _, answer = await pair.decoded(params, [*ids, *begun], request_id="2")
            said = begun + answer["choices"][0]["token_ids"]
        assert (said == true) == (resume == "generated_ids")

    async def over_a_pair() -> None:
        async with pair(base_dir) as workers:
            await body(workers)

    run(over_a_pair())


def test_a_call_that_does_not_end_is_hung() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    outcome = run(request(app, "POST", "/", {}, limit_s=5))  # type: ignore[arg-type]
    assert judged(outcome, None).end == "hung"


async def good(base_dir: Path, **fields: Any) -> tuple[Outcome, Truth]:
    """An undisturbed stream and what it must say."""
    async with running(base_dir, Shape()) as bench:
        body = {"model": "alpha", "stream": True, "stream_options": {"include_usage": True}}
        body |= {"return_token_ids": True, **fields, "messages": [QUESTION]}
        outcome = await bench.call("/v1/chat/completions", body, session="s")
        [ids] = bench.cluster.prompts["1"]
        return outcome, Truth.of(bench.cluster.words, "chat", body, [ids])


def _without(number: int) -> Callable[[list[Any]], list[Any]]:
    return lambda events: events[:number] + events[number + 1 :]


def _twice(number: int) -> Callable[[list[Any]], list[Any]]:
    return lambda events: events[: number + 1] + events[number:]


def _with(event: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda events: [*events[:3], event, *events[3:]]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda events: events, None),
        (_without(2), "token ids"),
        (_twice(2), "token ids"),
        (_without(-2), "usage"),
        (_without(-3), "finish reason"),
        (_twice(0), "the role came 2 times"),
        (lambda events: events[:-1], "ended without [DONE]"),
        (lambda events: events[:3], "ended without [DONE]"),
        (_with({"error": {"message": "m"}}), "not OpenAI's"),
        (lambda events: [*events, "[DONE]"], "behind the last"),
        (_with("[DONE]"), "behind the last"),
    ],
)
def test_a_spoilt_stream_is_seen(base_dir: Path, spoil: Any, problem: str | None) -> None:
    outcome, truth = run(good(base_dir))
    events = spoil(outcome.events())
    outcome.body = b"".join(
        b"data: " + (event if event == "[DONE]" else json.dumps(event)).encode() + b"\n\n"
        for event in events
    )
    verdict = judged(outcome, truth)
    assert (problem is None) == (not verdict.problems)
    assert problem is None or any(problem in each for each in verdict.problems)


def test_a_second_id_for_a_tool_call_is_seen(base_dir: Path) -> None:
    for seed in range(20):
        outcome, truth = run(good(base_dir, tools=TOOLS, temperature=1.0, seed=seed))
        if truth.choices[0].fields.calls:
            break
    assert not judged(outcome, truth).problems
    call = b'"tool_calls":[{"index":0,'
    at = outcome.body.rindex(call) + len(call)
    outcome.body = outcome.body[:at] + b'"id":"call-again",' + outcome.body[at:]
    assert "tool call 0 has the ids" in judged(outcome, truth).problems[0]


def test_an_event_that_is_cut_off_is_seen(base_dir: Path) -> None:
    outcome, truth = run(good(base_dir))
    outcome.body = outcome.body[:-20]
    assert "inside an event" in judged(outcome, truth).problems[0]


@pytest.mark.parametrize(
    ("fault", "leave", "must"),
    [
        (None, None, True),
        (None, Leave(after_s=0.001), False),
        (Fault("status_500"), None, True),
        (Fault("hang_before_grant"), None, False),
        (Fault("kill", down_s=1.0), None, True),
        (Fault("kill", down_s=100.0), None, False),
    ],
)
def test_who_must_succeed(
    base_dir: Path, fault: Fault | None, leave: Leave | None, must: bool
) -> None:
    async def body() -> bool:
        async with running(base_dir, Shape()) as bench:
            happenings = Happenings(bench)
            if fault is not None:
                bench.prefill[0].plan.add(fault)
            asked = {"model": "alpha", "messages": [QUESTION]}
            outcome = await bench.call("/v1/chat/completions", asked, leave=leave)
            return happenings.must_succeed("1", "alpha", 1, outcome)

    assert run(body()) == must
