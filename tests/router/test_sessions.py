"""Sessions: pins, inheritance, ends."""

import asyncio
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefillshare_server.router.identity import Identity
from prefillshare_server.router.ledger import Ledger
from prefillshare_server.router.sessions import Session, Sessions
from prefillshare_server.router.turns import Turns
from tests.router.conftest import Bench, Start, until


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def who(session: str | None, *, parent: str | None = None, final: bool = False) -> Identity:
    return Identity(session, parent, final)


def bound(sessions: Sessions, session_id: str, worker: str = "p0") -> Session:
    with sessions.opened(who(session_id)) as session:
        assert session is not None
        sessions.bind(session, worker)
    return session


def test_a_call_without_a_session_has_none() -> None:
    with Sessions(10).opened(who(None)) as session:
        assert session is None


def test_a_session_keeps_its_pin_between_calls() -> None:
    sessions = Sessions(10)
    bound(sessions, "s", "p1")
    with sessions.opened(who("s")) as session:
        assert session is not None
        assert session.prefill_worker == "p1"
    assert sessions.pinned == Counter(p1=1)


def test_a_session_that_was_never_prefilled_is_forgotten() -> None:
    sessions = Sessions(10)
    with pytest.raises(RuntimeError), sessions.opened(who("s")):
        raise RuntimeError
    assert sessions.get("s") is None
    assert not sessions._sessions


def test_rebinding_moves_the_count() -> None:
    sessions = Sessions(10)
    session = bound(sessions, "s", "p0")
    sessions.bind(session, "p1")
    assert +sessions.pinned == Counter(p1=1)


def test_a_child_starts_on_its_parents_worker_and_knows_its_contexts() -> None:
    sessions = Sessions(10)
    parent = bound(sessions, "parent", "p1")
    parent.ledger.keep_context(None, "shared", [1, 2], "alpha")
    with sessions.opened(who("child", parent="parent")) as child:
        assert child is not None
        assert child.prefill_worker == "p1"
        assert child.ledger.match("shared and more", lambda *_: True).ids == (1, 2)


def test_an_unknown_parent_is_no_parent() -> None:
    with Sessions(10).opened(who("child", parent="gone")) as child:
        assert child is not None
        assert child.prefill_worker is None


def test_the_final_call_ends_the_session_and_a_failed_one_does_not() -> None:
    sessions = Sessions(10)
    bound(sessions, "s")
    with pytest.raises(RuntimeError), sessions.opened(who("s", final=True)):
        raise RuntimeError
    assert sessions.get("s") is not None
    with sessions.opened(who("s", final=True)):
        pass
    assert sessions.get("s") is None
    assert sessions.pinned.total() == 0


def test_idle_sessions_are_swept_and_running_ones_are_not() -> None:
    clock = Clock()
    sessions = Sessions(10, clock)
    bound(sessions, "idle")
    bound(sessions, "busy")
    with sessions.opened(who("busy")):
        clock.now = 10.0
        assert sessions.sweep() == 1
        assert sessions.get("idle") is None
        assert sessions.get("busy") is not None


def test_a_session_ended_while_a_call_runs_does_not_come_back() -> None:
    sessions = Sessions(10)
    bound(sessions, "s")
    with sessions.opened(who("s")) as session:
        assert session is not None
        assert sessions.end("s")
        sessions.bind(session, "p1")
    assert sessions.get("s") is None
    assert sessions.pinned.total() == 0


class AnyOrder(RuleBasedStateMachine):
    """Pins count exactly the live sessions, whatever happens in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.sessions = Sessions(5, self.clock)

    @rule(
        session=st.sampled_from("abc"),
        parent=st.sampled_from(["a", "b", None]),
        worker=st.sampled_from(["p0", "p1", None]),
        final=st.booleans(),
    )
    def call(self, session: str, parent: str | None, worker: str | None, final: bool) -> None:
        with self.sessions.opened(who(session, parent=parent, final=final)) as opened:
            assert opened is not None
            if worker is not None:
                self.sessions.bind(opened, worker)

    @rule(session=st.sampled_from("abc"))
    def end(self, session: str) -> None:
        self.sessions.end(session)

    @rule(seconds=st.integers(0, 6))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        self.sessions.sweep()

    @invariant()
    def pins_are_counted_exactly(self) -> None:
        live = Counter(session.prefill_worker for session in self.sessions._sessions.values())
        assert +self.sessions.pinned == live
        assert self.sessions.in_flight == 0


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
TestAnyOrder = AnyOrder.TestCase


async def test_a_session_stays_on_its_prefill_worker_over_all_roles(start: Start) -> None:
    async with start(prefill=2) as bench:
        homes: dict[str, set[str]] = {"s0": set(), "s1": set(), "s2": set(), "s3": set()}
        for turn in range(3):
            for session, workers in homes.items():
                for role in ("alpha", "beta"):
                    _, answer, _ = await bench.chat(
                        f"{session} {turn}", model=role, headers={"X-Session-ID": session}
                    )
                    workers.add(answer["prefillshare"]["prefill_worker"])
        assert [len(workers) for workers in homes.values()] == [1, 1, 1, 1]
        assert Counter(w for workers in homes.values() for w in workers) == Counter(
            {"prefill-0": 2, "prefill-1": 2}
        )
        assert await bench.metric("prefillshare_session_pins") == 4


async def test_calls_that_start_together_share_one_worker(start: Start) -> None:
    async with start(prefill=2) as bench:
        for prefill in bench.prefill:
            prefill.fault = "slow"
        calls = [
            asyncio.create_task(bench.chat(model=role, headers={"X-Session-ID": "s"}))
            for role in ("alpha", "beta")
        ]
        await until(lambda: sum(len(prefill.requests) for prefill in bench.prefill) == 2)
        for prefill in bench.prefill:
            prefill.gate.set()
        answers = [answer for _, answer, _ in await asyncio.gather(*calls)]
        assert len({a["prefillshare"]["prefill_worker"] for a in answers}) == 1


async def test_the_totals_of_a_session_are_told_and_end_with_it(bench: Bench) -> None:
    headers = {"X-Session-ID": "order/4711"}
    question = "another question about numbers " * 10
    answers = [
        (await bench.chat(question, model=role, headers=headers))[1]
        for role in ("alpha", "beta", "alpha")
    ]
    status, totals = await bench.get("/v1/sessions/order/4711")
    assert status == 200
    reports = [answer["prefillshare"] for answer in answers]
    assert totals["calls"] == 3
    assert totals["prompt_tokens"] == sum(a["usage"]["prompt_tokens"] for a in answers)
    assert totals["cached_tokens"] == sum(report["cached_tokens"] for report in reports)
    assert totals["computed_tokens"] == sum(report["computed_tokens"] for report in reports)
    assert totals["handoff_bytes"] == sum(report["handoff_bytes"] for report in reports)
    assert totals["generated_tokens"] == sum(a["usage"]["completion_tokens"] for a in answers)
    # Each of the two roles alone would have prefilled the question once.
    assert totals["per_model_prefill_tokens"] == 2 * answers[0]["usage"]["prompt_tokens"]
    assert totals["roles"] == ["alpha", "beta"]
    assert totals["prefill_worker"] == "prefill-0"

    async with bench.http.delete(f"{bench.url}/v1/sessions/order/4711") as response:
        assert (await response.json())["deleted"] is True
    status, body = await bench.get("/v1/sessions/order/4711")
    assert status == 404
    assert body["error"]["code"] == "session_not_found"


async def test_what_other_sessions_left_in_the_cache_saves_nothing(bench: Bench) -> None:
    question = "another question about numbers " * 10
    computed = []
    messages = [{"role": "system", "content": question}, {"role": "user", "content": question}]
    for session in ("cold", "warm"):
        for role in ("alpha", "beta"):
            await bench.chat(model=role, messages=messages, headers={"X-Session-ID": session})
        totals = (await bench.get(f"/v1/sessions/{session}"))[1]
        computed.append((totals["per_model_prefill_tokens"], totals["computed_tokens"]))
    prompt = totals["prompt_tokens"] // 2
    (alone, shared), (alone_warm, shared_warm) = computed
    assert alone == 2 * prompt > shared
    assert alone_warm == shared_warm < prompt


async def test_prompts_share_what_their_session_sent_before_whatever_is_cached(
    bench: Bench,
) -> None:
    question = "another question about numbers " * 10
    for session in ("cold", "warm"):
        headers = {"X-Session-ID": session}
        _, first, _ = await bench.chat(question, headers=headers)
        head = {"role": "system", "content": "Be brief."}
        messages = [head, {"role": "user", "content": question}]
        await bench.chat(model="beta", messages=messages, headers=headers)
        calls = (await bench.get(f"/v1/sessions/{session}/calls"))[1]["data"]
        assert [call["shared_tokens"] for call in calls] == [0, calls[0]["context_tokens"] + 1]
    assert first["prefillshare"]["cached_tokens"] > 0


async def test_the_final_header_ends_a_session(bench: Bench) -> None:
    await bench.chat(headers={"X-Session-ID": "s"})
    await bench.chat(headers={"X-Session-ID": "s", "X-Session-Final": "true"})
    assert (await bench.get("/v1/sessions/s"))[0] == 404


async def test_calls_without_a_session_are_placed_and_leave_no_ledger(bench: Bench) -> None:
    _, answer, headers = await bench.chat()
    assert answer["prefillshare"]["session"] is None
    assert answer["prefillshare"]["affinity"] == "none"
    assert "X-PrefillShare-Session" not in headers
    assert await bench.metric("prefillshare_session_pins") == 0


async def test_role_switches_are_counted(bench: Bench) -> None:
    for role in ("alpha", "beta", "beta", "alpha"):
        await bench.chat(model=role, headers={"X-Session-ID": "s"})
    assert await bench.metric("prefillshare_model_switches_total") == 2


def test_what_changes_within_the_end_of_a_prompt_is_all_that_is_new_to_its_role() -> None:
    session = Session("s", ledger=Ledger(), turns=Turns())

    assert session.new_in_tail("critic", [1, 2, 3, 4]) == 4
    assert session.new_in_tail("critic", [1, 2, 3, 4]) == 0
    assert session.new_in_tail("critic", [1, 2, 9, 9, 9, 4]) == 3
    assert session.new_in_tail("critic", [1, 2, 3, 4]) == 0
    assert session.new_in_tail("planner", [1, 2, 3, 4]) == 4
