"""`router.max_sessions`: who is let in, who waits, and that nothing is left behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefillshare_server.router.errors import RouterError
from prefillshare_server.router.identity import Identity
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.session_limit import SessionLimit
from prefillshare_server.router.sessions import Sessions
from tests.router.conftest import Bench, Start, until
from tests.router.room import settle


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """A limit, the sessions it counts, and calls that run until they are told to end."""

    def __init__(self, most: int | None = 1, queue: int = 8, queue_s: float = 600) -> None:
        self.clock = Clock()
        self.sessions = Sessions(10, self.clock)
        self.limit = SessionLimit(self.sessions, Metrics(), most=most, queue=queue, queue_s=queue_s)

    def call(self, session: str | None, **options: Any) -> "Call":
        return Call(self, session, **options)


class Call:
    """One call, which pins its session unless `fails`."""

    def __init__(
        self,
        gate: Gate,
        session: str | None,
        *,
        parent: str | None = None,
        final: bool = False,
        fails: bool = False,
    ) -> None:
        self.gate = gate
        self.who = Identity(session, parent, final)
        self.fails = fails
        self.inside = False
        self.ending = asyncio.Event()
        self.error: RouterError | None = None
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            with await self.gate.limit.entered(self.who), self.gate.sessions.opened(self.who) as it:
                self.inside = True
                await self.ending.wait()
                if it is not None and not self.fails:
                    self.gate.sessions.bind(it, "p0")
        except RouterError as error:
            self.error = error
        finally:
            self.inside = False

    async def end(self) -> None:
        self.ending.set()
        await self.task


async def test_a_further_session_waits_until_one_ends() -> None:
    gate = Gate()
    first, second = gate.call("a"), gate.call("b")
    await settle()
    assert (first.inside, second.inside) == (True, False)
    await first.end()
    await settle()
    assert not second.inside, "a session stays active between its calls"
    gate.sessions.end("a")
    await settle()
    assert second.inside


async def test_calls_of_an_active_session_are_let_in_at_once() -> None:
    gate = Gate()
    await gate.call("a").end()
    gate.call("b")
    again = gate.call("a")
    await settle()
    assert again.inside


@pytest.mark.parametrize("how", ["final", "ttl", "failed", "cancelled"])
async def test_a_session_makes_room_however_it_ends(how: str) -> None:
    gate = Gate()
    first = gate.call("a", final=how == "final", fails=how == "failed")
    waiting = gate.call("b")
    await settle()
    if how == "cancelled":
        first.task.cancel()
    else:
        await first.end()
    if how == "ttl":
        gate.clock.now = 11
        gate.sessions.sweep()
    await settle()
    assert waiting.inside


async def test_a_session_ended_during_a_call_counts_until_the_call_is_over() -> None:
    gate = Gate()
    await gate.call("a").end()
    running, waiting = gate.call("a"), gate.call("b")
    await settle()
    gate.sessions.end("a")
    await settle()
    assert not waiting.inside
    await running.end()
    await settle()
    assert waiting.inside


async def test_calls_without_a_session_count_while_they_run() -> None:
    gate = Gate()
    alone, second = gate.call(None), gate.call(None)
    await settle()
    assert (alone.inside, second.inside, gate.limit.active) == (True, False, 1)
    await alone.end()
    await settle()
    assert second.inside
    await second.end()
    assert gate.limit.active == 0


async def test_first_come_first_served() -> None:
    gate = Gate()
    calls = [gate.call(name, final=True) for name in "abcd"]
    await settle()
    for position, call in enumerate(calls):
        assert [other.inside for other in calls[position:]] == [True] + [False] * (3 - position)
        await call.end()
        await settle()


async def test_a_fork_of_an_active_session_is_let_in_beyond_the_limit() -> None:
    gate = Gate()
    gate.call("parent")
    other = gate.call("other")
    await settle()
    fork = gate.call("fork", parent="parent")
    await settle()
    assert (fork.inside, other.inside, gate.limit.active) == (True, False, 2)


async def test_a_fork_that_waits_is_let_in_with_its_parent() -> None:
    gate = Gate()
    first, fork, parent = gate.call("a", final=True), gate.call("fork", parent="p"), gate.call("p")
    await settle()
    assert not fork.inside
    await first.end()
    await settle()
    # The fork stood in front, so the one place is its; its parent waits for one of its own.
    assert (fork.inside, parent.inside) == (True, False)

    gate = Gate()
    first, parent, fork = gate.call("a", final=True), gate.call("p"), gate.call("fork", parent="p")
    await settle()
    await first.end()
    await settle()
    assert (parent.inside, fork.inside) == (True, True)


async def test_all_waiting_calls_of_a_session_are_let_in_together() -> None:
    gate = Gate()
    first, calls = gate.call("a", final=True), [gate.call("b"), gate.call("b")]
    await settle()
    await first.end()
    await settle()
    assert [call.inside for call in calls] == [True, True]


async def test_a_full_line_is_a_429_that_says_when_to_come_back() -> None:
    gate = Gate(queue=1)
    gate.call("a")
    gate.call("b")
    await settle()
    third = gate.call("c")
    await third.task
    assert third.error is not None
    assert (third.error.status, third.error.code) == (429, "session_limit")
    assert "Retry-After" in third.error.headers
    assert "router.max_sessions" in third.error.message
    assert gate.limit.waiting == 1


async def test_who_waits_too_long_is_told_so_and_leaves_the_line() -> None:
    gate = Gate(queue_s=0.01)
    gate.call("a")
    second = gate.call("b")
    await second.task
    assert second.error is not None
    assert (second.error.status, second.error.code) == (504, "queue_timeout")
    assert "Retry-After" in second.error.headers
    assert (gate.limit.waiting, gate.limit.active) == (0, 1)


async def test_who_is_cancelled_just_after_being_let_in_takes_no_place_along() -> None:
    gate = Gate()
    first, second, third = (gate.call(name, final=True) for name in "abc")
    await settle()
    first.ending.set()
    await asyncio.sleep(0)
    second.task.cancel()
    await settle()
    assert third.inside
    assert gate.limit.active == 1


async def test_without_a_limit_nobody_waits_and_sessions_are_counted() -> None:
    gate = Gate(most=None, queue=0)
    calls = [gate.call(name) for name in ("a", "b", None)]
    await settle()
    assert all(call.inside for call in calls)
    assert gate.limit.active == 3


Step = tuple[str, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["call", "call", "call", "end", "cancel", "delete", "sweep"]),
        st.integers(0, 5),
        st.integers(0, 7),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(steps)
def test_whatever_happens_the_limit_holds_the_line_moves_and_all_drains(todo: list[Step]) -> None:
    asyncio.run(_play(todo))


async def _play(todo: list[Step]) -> None:
    gate = Gate(most=2, queue=4)
    names = ["a", "b", "c", "d", "e", None]
    calls: list[Call] = []
    for what, which, how in todo:
        running = [call for call in calls if not call.task.done()]
        if what == "call":
            # No parents: forks may exceed the limit.
            calls.append(gate.call(names[which], final=bool(how & 1), fails=bool(how & 2)))
        elif what == "delete":
            gate.sessions.end(names[which] or "")
        elif what == "sweep":
            gate.clock.now += 4 * how
            gate.sessions.sweep()
        elif running:
            call = running[which % len(running)]
            if what == "cancel":
                call.task.cancel()
            call.ending.set()
        await settle()
        _check(gate, calls)
    for call in calls:
        call.ending.set()
    while not all(call.task.done() for call in calls):
        gate.sessions.sweep()
        gate.clock.now += 100
        await settle()
    gate.clock.now += 100
    gate.sessions.sweep()
    await asyncio.gather(*(call.task for call in calls), return_exceptions=True)
    assert (gate.limit.active, gate.limit.waiting) == (0, 0)
    assert not gate.limit._calls
    assert not gate.sessions._sessions


def _check(gate: Gate, calls: list[Call]) -> None:
    inside = [call.who.session for call in calls if call.inside]
    live = set(gate.sessions._sessions) | {name for name in inside if name is not None}
    assert gate.limit.active == len(live) + inside.count(None) <= 2
    waiting = [call for call in calls if not call.task.done() and not call.inside]
    assert gate.limit.waiting == len(waiting) <= 4
    assert not waiting or gate.limit.active == 2
    assert not live & {call.who.session for call in waiting}


# Through HTTP.

ONE = {"router": {"max_sessions": 1}}


def session(name: str, **more: str) -> dict[str, str]:
    return {"X-Session-ID": name, **more}


@asynccontextmanager
async def waiting(bench: Bench, *names: str) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """First calls of sessions that wait in line; they must be over when the block ends."""
    tasks = []
    for name in names:
        tasks.append(asyncio.create_task(bench.chat(headers=session(name))))
        await until(lambda: bench.router.limit.waiting == len(tasks))
    with ExitStack() as stack:
        for task in tasks:
            stack.callback(task.cancel)
        yield tasks


async def test_a_session_that_is_deleted_lets_the_next_one_in(start: Start) -> None:
    async with start(settings=ONE) as bench:
        await bench.chat(headers=session("a"))
        async with waiting(bench, "b") as [second]:
            assert await bench.metric("prefillshare_active_sessions") == 1
            assert await bench.metric("prefillshare_queued_session_calls") == 1
            assert (await bench.chat(headers=session("a")))[0] == 200
            async with bench.http.delete(f"{bench.url}/v1/sessions/a") as response:
                assert response.status == 200
            assert (await second)[0] == 200
        await bench.chat(headers=session("b", **{"X-Session-Final": "true"}))
        assert await bench.metric("prefillshare_active_sessions") == 0


async def test_a_client_that_leaves_leaves_the_line(start: Start) -> None:
    async with start(settings=ONE) as bench:
        await bench.chat(headers=session("a"))
        async with waiting(bench, "b") as [second]:
            second.cancel()
            assert not await bench.settled()
        ended = 'prefillshare_router_requests_total{model="alpha",result="client_closed"'
        assert await bench.counted(ended, 1) == 1


async def test_a_client_of_a_prefill_ahead_that_leaves_leaves_the_line(start: Start) -> None:
    async with start(settings=ONE) as bench:
        await bench.chat(headers=session("a"))
        body = {"messages": [{"role": "user", "content": "a question"}]}
        task = asyncio.create_task(bench.post("/v1/sessions/b/prefill", body))
        await until(lambda: bench.router.limit.waiting == 1)
        task.cancel()
        assert not await bench.settled()
        bench.router.sessions.end("a")
        assert len(bench.prefill[0].requests) == 1


async def test_a_prefill_ahead_opens_its_session_through_the_same_gate(start: Start) -> None:
    async with start(settings=ONE) as bench:
        messages = [{"role": "user", "content": "another question about numbers " * 8}]
        body = {"messages": messages, "wait": True}
        assert (await bench.post("/v1/sessions/a/prefill", body))[0] == 200
        task = asyncio.create_task(bench.post("/v1/sessions/b/prefill", body))
        await until(lambda: bench.router.limit.waiting == 1)
        assert (await bench.post("/v1/sessions/a/prefill", body))[0] == 200
        bench.router.sessions.end("a")
        assert (await task)[0] == 200
        assert bench.router.limit.active == 1


async def test_a_full_line_is_refused_with_a_status_also_for_a_stream(start: Start) -> None:
    router = {"max_sessions": 1, "session_queue": 0}
    async with start(settings={"router": router}) as bench:
        await bench.chat(headers=session("a"))
        for stream in (False, True):
            status, body, headers = await bench.chat(headers=session("b"), stream=stream)
            assert (status, body["error"]["code"]) == (429, "session_limit")
            assert headers["Retry-After"] == "5"
        fork = session("fork", **{"X-Parent-Session-ID": "a"})
        assert (await bench.chat(headers=fork))[0] == 200
