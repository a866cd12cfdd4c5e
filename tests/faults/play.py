"""Plays a scenario against a router and reports everything that is not as it must be."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.bench import Bench, running
from tests.faults.client import Outcome
from tests.faults.oracle import Truth, Verdict, judged
from tests.faults.rules import Happenings
from tests.faults.scenario import CallPlan, Scenario, SessionPlan, Strike
from tests.mocks.mock_pair_text import text_of

RECOVERY_S = 12.0
"""Virtual seconds a router gets at most to notice that all workers are well again."""


@dataclass
class Report:
    """What a scenario came to."""

    scenario: Scenario | None = None
    calls: int = 0
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.hung or self.leaked)

    def __str__(self) -> str:
        found = [
            f"{kind}: {what}"
            for kind in ("wrong", "hung", "leaked")
            for what in getattr(self, kind)
        ]
        return "\n".join([str(self.scenario), *self.log, "", *found])


@dataclass(frozen=True, slots=True)
class Request:
    """A call as it was sent, with what its prompts must read like."""

    number: str
    path: str
    body: dict[str, Any]
    texts: list[str]
    sequences: int


async def play(scenario: Scenario, base_dir: Path) -> Report:
    """Run `scenario` from its first call to the last thing that has to be free again."""
    report = Report(scenario)
    async with running(base_dir, scenario.shape, scenario.seed) as bench:
        _arm(bench, scenario)
        happenings = Happenings(bench, tight=scenario.shape.tight)
        striking = [
            asyncio.create_task(_strike(bench, happenings, strike)) for strike in scenario.strikes
        ]
        sessions = [_session(bench, happenings, session, report) for session in scenario.sessions]
        await asyncio.gather(*sessions)
        await asyncio.gather(*striking)
        report.leaked += await bench.leaks()
        await recovered(bench, happenings, report)
        report.leaked += await bench.leaks() + bench.gauges()
        report.wrong += bench.cluster.violations
        report.log = bench.cluster.log
    return report


def _arm(bench: Bench, scenario: Scenario) -> None:
    for worker in bench.workers:
        for fault in scenario.faults[worker.id]:
            worker.plan.add(fault)
    for prefill in bench.prefill:
        prefill.deaf = scenario.deaf.get(prefill.id, 0)
    for decode in bench.decode.values():
        decode.pace_s, decode.merging = scenario.pace_s, scenario.merging


async def _strike(bench: Bench, happenings: Happenings, strike: Strike) -> None:
    await asyncio.sleep(strike.at_s)
    now = asyncio.get_running_loop().time()
    if strike.what == "kill":
        bench.worker(strike.worker).kill(strike.for_s)
    elif strike.what == "expire":
        bench.cluster.note("all leases expire")
        happenings.expiries.append(now)
        bench.cluster.clock.advance(bench.cluster.lease_s + 1)
    else:
        end = now + strike.for_s if strike.for_s is not None else float("inf")
        happenings.drains.setdefault(strike.worker, []).append((now, end))
        await bench.drain(strike.worker, on=True)
        if strike.for_s is not None:
            await asyncio.sleep(strike.for_s)
            await bench.drain(strike.worker, on=False)


async def _session(
    bench: Bench, happenings: Happenings, session: SessionPlan, report: Report
) -> None:
    """Call after call, each with what was said before, as an agent does."""
    talk = Talk()
    for plan in session.calls:
        await asyncio.sleep(plan.pause_s)
        asked = talk.asking(plan.question, plan.number)
        request = made(bench, plan, asked.sent, asked.written)
        verdict = await called(bench, happenings, request, report, plan, session.id)
        if plan.kind == "chat":
            talk = asked.answered(verdict) or talk


@dataclass(frozen=True, slots=True)
class Talk:
    """The messages of a session."""

    sent: tuple[Any, ...] = ()
    """As the client sends them."""
    written: tuple[Any, ...] = ()
    """The same with tool calls as the decoder wrote them, which is how they are rendered."""

    def asking(self, question: str, number: int) -> "Talk":
        """With a question that names its call."""
        message = {"role": "user", "content": f"{question} #{number}"}
        return Talk((*self.sent, message), (*self.written, message))

    def answered(self, verdict: Verdict) -> "Talk | None":
        """With the answer, and results of the tools it called; None if there is none to keep."""
        if verdict.end != "answered" or not verdict.choices:
            return None
        first = verdict.choices[0]
        message: dict[str, Any] = {"role": "assistant", "content": first.fields.content}
        if not first.fields.calls:
            return Talk((*self.sent, message), (*self.written, message))
        if first.finish_reason == "length":
            return None  # Half a tool call is nothing to go on from.
        calls = [
            {"id": ids[0], "type": "function", "function": {"name": name, "arguments": arguments}}
            for (name, arguments), ids in zip(
                first.fields.calls, first.call_ids.values(), strict=True
            )
        ]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls
        ]
        return Talk(
            (*self.sent, message | {"tool_calls": calls}, *results),
            (*self.written, message | {"content": verdict.raw}, *results),
        )


def made(bench: Bench, plan: CallPlan, sent: Sequence[Any], written: Sequence[Any]) -> Request:
    """The request of a call. `written` is `sent` with tool calls as the decoder wrote them."""
    sequences = plan.prompts * plan.body.get("n", 1)
    if plan.kind == "completions":
        texts = [f"{plan.question} {number} #{plan.number}" for number in range(plan.prompts)]
        prompt: Any = texts if plan.prompts > 1 else texts[0]
        body = {**plan.body, "prompt": prompt}
        return Request(str(plan.number), "/v1/completions", body, texts, sequences)
    rendered = bench.layout.render(
        list(written),
        plan.body.get("tools"),
        template_kwargs=plan.body.get("chat_template_kwargs"),
    )
    body = {**plan.body, "messages": list(sent)}
    path = "/v1/chat/completions"
    return Request(str(plan.number), path, body, [rendered.full], sequences)


async def called(
    bench: Bench,
    happenings: Happenings,
    request: Request,
    report: Report,
    plan: CallPlan,
    session: str | None,
) -> Verdict:
    """Make the call, judge it, and write what is wrong into the report."""
    bench.cluster.note(f"call {request.number} of {session} to {plan.role} begins: {plan.body}")
    outcome = await bench.call(request.path, request.body, session=session, leave=plan.leave)
    verdict = _verdict(bench, request, plan, outcome)
    must = happenings.must_succeed(request.number, plan.role, request.sequences, outcome)
    if must and verdict.end not in ("answered", "hung"):
        verdict.problems.append(f"had to succeed and ended in {verdict.end}")
    bench.cluster.note(f"call {request.number} ends: {verdict.end} {verdict.problems or ''}")
    if verdict.problems and outcome.status != 200:
        bench.cluster.note(f"its body: {outcome.body!r}")
    report.calls += 1
    report.answered += verdict.end == "answered"
    report.wrong += [f"call {request.number}: {problem}" for problem in verdict.problems]
    if verdict.end == "hung":
        report.hung.append(f"call {request.number}")
    return verdict


def _verdict(bench: Bench, request: Request, plan: CallPlan, outcome: Outcome) -> Verdict:
    words = bench.cluster.words
    by_text: dict[str, list[tuple[int, ...]]] = {text: [] for text in request.texts}
    strange = []
    for ids in bench.cluster.prompts.get(request.number, ()):
        text = words.decode(ids)
        if text in by_text:
            by_text[text].append(ids)
        else:
            strange.append(f"prefilled a prompt that was not asked for: {text!r}")
    strange += [
        f"one prompt as {len(ids)} different token lists"
        for ids in by_text.values()
        if len(ids) > 1
    ]
    truth = None
    if all(by_text.values()):
        prompts = [by_text[text][0] for text in request.texts]
        truth = Truth.of(words, plan.kind, request.body, prompts)
    verdict = judged(outcome, truth)
    verdict.problems += strange
    if truth is not None and verdict.choices:
        said = truth.choices[0]
        verdict.raw = text_of(words, said.ids)
    return verdict


async def recovered(bench: Bench, happenings: Happenings, report: Report) -> None:
    """With every worker well again, a call of each role is answered."""
    for worker in bench.workers:
        worker.plan.faults.clear()
        await worker.restart()
    now = asyncio.get_running_loop().time()
    for worker_id, spans in happenings.drains.items():
        if any(end > now for _, end in spans):
            await bench.drain(worker_id, on=False)
    for _ in range(100):
        if all(bench.router.health.available(worker.id) for worker in bench.workers):
            break
        await asyncio.sleep(RECOVERY_S / 100)
    for number, role in enumerate(bench.router.placement.decode, 900):
        plan = CallPlan(number, role, "chat", {"model": role, "stream": True}, "a question")
        question = [{"role": "user", "content": f"a question #{number}"}]
        request = made(bench, plan, question, question)
        verdict = await called(bench, happenings, request, report, plan, None)
        if verdict.end not in ("answered", "hung"):
            report.wrong.append(f"{role} answers no calls although every worker is well again")
