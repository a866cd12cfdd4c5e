"""Any order of calls, cancellations and faults: the same oracle, and everything zero at the end."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from tests.faults.bench import Bench, Shape, running
from tests.faults.client import Leave, request
from tests.faults.play import Report, Talk, called, made, recovered
from tests.faults.rules import Happenings
from tests.faults.scenario import TOOLS, CallPlan
from tests.faults.virtual_time import VirtualTimeLoop
from tests.mocks.mock_pair_faults import DECODE_FAULTS, PREFILL_FAULTS, Fault

pytestmark = pytest.mark.faults

SHAPE = Shape(prefill=2, decode=("alpha-0", "alpha-1", "beta-0"))
SESSIONS = ("s0", "s1")
PREFILL = st.sampled_from(["prefill-0", "prefill-1"])
DECODE = st.sampled_from(list(SHAPE.decode))
WORKER = PREFILL | DECODE
PAUSE = st.sampled_from([0.0, 0.003, 0.01, 0.03, 0.2])
ASK = st.tuples(
    st.sampled_from(SESSIONS),
    st.booleans(),
    st.sampled_from(["text", "tools", "json", "reason"]),
    st.sampled_from([1, 1, 2]),
)
"""Session, whether it streams, form of the answer, n."""
FAULT = st.tuples(PREFILL, st.builds(Fault, st.sampled_from(PREFILL_FAULTS))) | st.tuples(
    DECODE,
    st.builds(
        Fault, st.sampled_from(DECODE_FAULTS), st.just(0), st.sampled_from([-1, 0, 1, 2, 4, 6, 9])
    ),
)


@dataclass
class _Running:
    task: asyncio.Task[None]
    leave: asyncio.Event


class Machine(RuleBasedStateMachine):
    """A router over the mock pair. Calls go on while the rules change the world around them."""

    base_dir: Path

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.report = Report()
        self.stop = asyncio.Event()
        self.bench: Bench
        self.happenings: Happenings
        self.serving: asyncio.Task[None]
        self.calls: list[_Running] = []
        self.talks = dict.fromkeys(SESSIONS, Talk())
        self.roles = dict.fromkeys(SESSIONS, "alpha")
        self.count = 0

    @initialize()
    def start(self) -> None:
        started: asyncio.Future[Bench] = self.loop.create_future()

        async def serve() -> None:
            async with running(self.base_dir, SHAPE) as bench:
                started.set_result(bench)
                await self.stop.wait()

        self.serving = self.loop.create_task(serve())
        self.bench = self.loop.run_until_complete(started)
        self.happenings = Happenings(self.bench)

    @rule(asks=st.lists(ASK, min_size=1, max_size=3), pause=PAUSE)
    def call(self, asks: list[tuple[str, bool, str, int]], pause: float) -> None:
        """Begin calls, each of a session that may have others under way."""
        for ask in asks:
            self._begin(*ask)
        self._wait(pause)

    def _begin(self, session: str, stream: bool, form: str, n: int) -> None:
        self.count += 1
        role = self.roles[session]
        body: dict[str, Any] = {"model": role, "stream": stream, "n": n, "return_token_ids": True}
        if stream:
            body["stream_options"] = {"include_usage": True}
        if form == "tools":
            body["tools"] = TOOLS
        if form == "json":
            body["response_format"] = {"type": "json_object"}
        if form == "reason":
            body["chat_template_kwargs"] = {"enable_thinking": True}
        leave = asyncio.Event()
        plan = CallPlan(self.count, role, "chat", body, "a question", leave=Leave(on=leave))
        task = self.loop.create_task(self._call(session, plan))
        self.calls.append(_Running(task, leave))

    async def _call(self, session: str, plan: CallPlan) -> None:
        before = self.talks[session]
        asked = before.asking(plan.question, plan.number)
        request = made(self.bench, plan, asked.sent, asked.written)
        verdict = await called(self.bench, self.happenings, request, self.report, plan, session)
        if self.talks[session] is before:
            self.talks[session] = asked.answered(verdict) or before

    @rule(session=st.sampled_from(SESSIONS), wait=st.booleans(), pause=PAUSE)
    def prefill_ahead(self, session: str, wait: bool, pause: float) -> None:
        """Have what the session's next call may ask read before; its client may wait for it."""
        self.count += 1
        asked = self.talks[session].asking("a question", self.count)
        leave = asyncio.Event()
        task = self.loop.create_task(self._ahead(session, asked, wait, leave))
        self.calls.append(_Running(task, leave))
        self._wait(pause)

    async def _ahead(self, session: str, asked: Talk, wait: bool, leave: asyncio.Event) -> None:
        path, body = f"/v1/sessions/{session}/prefill", {"messages": asked.sent, "wait": wait}
        outcome = await request(self.bench.app, "POST", path, body, leave=Leave(on=leave))
        self.bench.cluster.note(f"prefill ahead of {session} ends: {outcome.status}")
        if outcome.hung:
            self.report.hung.append(f"prefill ahead of {session}")
        if outcome.crash is not None or outcome.status not in (None, 200, 202, 502, 503, 504):
            self.report.wrong.append(f"prefill ahead of {session}: {outcome}")

    @rule(session=st.sampled_from(SESSIONS))
    def switch_role(self, session: str) -> None:
        self.roles[session] = "beta" if self.roles[session] == "alpha" else "alpha"

    @rule(seconds=PAUSE | st.just(3.0))
    def pass_time(self, seconds: float) -> None:
        self._wait(seconds)

    @precondition(lambda self: any(not call.task.done() for call in self.calls))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        under_way = [number for number, call in enumerate(self.calls) if not call.task.done()]
        self.calls[data.draw(st.sampled_from(under_way), label="call")].leave.set()
        self._wait(0.0)

    @rule(faults=st.lists(FAULT, min_size=1, max_size=3))
    def fault(self, faults: list[tuple[str, Fault]]) -> None:
        """Let the next request to a worker meet a fault."""
        for worker, fault in faults:
            self.bench.worker(worker).plan.add(fault)

    @rule(worker=WORKER, down_s=st.sampled_from([0.02, 0.3, 2.0, None]))
    def kill(self, worker: str, down_s: float | None) -> None:
        async def killed() -> None:
            self.bench.worker(worker).kill(down_s)

        self.loop.run_until_complete(killed())

    @rule(worker=WORKER)
    def restart(self, worker: str) -> None:
        self.loop.run_until_complete(self.bench.worker(worker).restart())

    @rule()
    def expire(self) -> None:
        self.happenings.expiries.append(self.loop.time())
        self.bench.cluster.note("all leases expire")
        self.bench.cluster.clock.advance(self.bench.cluster.lease_s + 1)

    @rule(worker=WORKER)
    def drain(self, worker: str) -> None:
        spans = self.happenings.drains.setdefault(worker, [])
        now = self.loop.time()
        if spans and spans[-1][1] > now:
            spans[-1] = (spans[-1][0], now)
            self.loop.run_until_complete(self.bench.drain(worker, on=False))
        else:
            spans.append((now, float("inf")))
            self.loop.run_until_complete(self.bench.drain(worker, on=True))

    def _wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def teardown(self) -> None:
        try:
            if hasattr(self, "bench"):
                try:
                    self.loop.run_until_complete(self._end())
                finally:
                    self.stop.set()
                    self.loop.run_until_complete(self.serving)
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
        note(str(self.report))
        assert not self.report.failed, self.report

    async def _end(self) -> None:
        if self.calls:
            await asyncio.wait([call.task for call in self.calls])
            for call in self.calls:
                call.task.result()
        report, bench = self.report, self.bench
        report.leaked += await bench.leaks()
        await recovered(bench, self.happenings, report)
        report.leaked += await bench.leaks() + bench.gauges()
        report.wrong += bench.cluster.violations
        report.log = bench.cluster.log


def test_any_order_of_calls_and_faults(base_dir: Path) -> None:
    Machine.base_dir = base_dir
    run_machine(
        Machine,
        settings=settings(
            max_examples=100,
            stateful_step_count=30,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
