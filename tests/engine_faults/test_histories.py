"""The same context, role and temperature 0 give the same tokens, whatever happens (I1, I2).

Hundreds of randomised sessions on real engines, whose small KV caches evict, whose decode workers
preempt now and then, and whose connections break in the middle of answers. Every answer is held
against an in-process reference, and against the same sessions without faults.

With PREFILLSHARE_WRITE_RESULTS=1 the figures of the run go to docs/results/exactness.json.
"""

import asyncio
import json
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prefillshare_server.config import Cluster
from prefillshare_server.models import store
from tests.engine_faults.at_rest import assert_at_rest, state
from tests.engine_faults.calls import Answer, Kind, call
from tests.engine_faults.cut_proxy import Attempt, CutProxies, never
from tests.engine_faults.exactness import Reference
from tests.engine_faults.histories import Call, History
from tests.engine_faults.preempting import Preemptions, preempting_plan
from tests.served import Served, serve_in_thread

pytestmark = [pytest.mark.engine, pytest.mark.exactness, pytest.mark.timeout(600)]

HISTORIES = 200
AT_ONCE = 12
PREEMPTED = 0.1
CUT = 0.1
"""Shares of attempts."""

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "exactness.json"
WRITE_ENV = "PREFILLSHARE_WRITE_RESULTS"

ROLES = {"planner": "tiny-a", "solver": "tiny-b"}
CLUSTER = Cluster.model_validate(
    {
        "base": {"model": "tiny-base"},
        "prefill": {"replicas": 2},
        "roles": {role: {"model": model, "replicas": 2} for role, model in ROLES.items()},
        "decode": {
            "args": {
                # Holds the longest session, and evicts before the next ones come back.
                "num-gpu-blocks-override": 64,
                # Random weights like blanks, and JSON may hold any number of them.
                "structured-outputs-config": json.dumps(
                    {"backend": "xgrammar", "disable_any_whitespace": True}
                ),
            }
        },
        "dtype": "float32",
        "max_model_len": 1536,
        "kv": {"blocks": 200},
        "timeouts": {"start_s": 240},
    }
)


class SomeCuts:
    """Cuts a share of the attempts, the same in every run as far as their timing allows.

    Streams are cut behind a new token. A whole answer that is cut has brought none, so it happens
    once for the same prompt: after three attempts without a new token the router gives up. An
    attempt that is to be preempted is not cut as well, so that each fault can be told.
    """

    def __init__(self, seed: int, preemptions: Preemptions) -> None:
        self._seed = seed
        self._preemptions = preemptions
        self._whole: set[str] = set()

    def __call__(self, attempt: Attempt) -> int | None:
        body = attempt.body
        prompt = body["kv_transfer_params"]["prefillshare"]["prompt_digest"]
        chance = random.Random(f"{self._seed} {prompt} {attempt.generated}")
        preempted = self._preemptions.preempts_at(prompt, attempt.generated) is not None
        if preempted or chance.random() >= CUT:
            return None
        if body.get("stream"):
            return attempt.generated + chance.randint(1, 8)
        if prompt in self._whole:
            return None
        self._whole.add(prompt)
        return 0


@dataclass(frozen=True)
class Outcome:
    """Both runs of all histories."""

    disturbed: list[list[Call]]
    undisturbed: list[list[Call]]
    preemptions: int
    failovers: int
    decode_prompt_tokens: int
    """Prompt tokens that decode workers computed during the disturbed run."""


@pytest.fixture(scope="module")
def preemptions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("control") / "preemptions.json"
    Preemptions().write(path)
    return path


@pytest.fixture(scope="module")
def cuts() -> Iterator[CutProxies]:
    with CutProxies() as proxies:
        yield proxies


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, preemptions: Path, cuts: CutProxies
) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        planned = preempting_plan(preemptions)
        patch.setattr("prefillshare_server.launch.local_cluster.plan", planned)
        logs = tmp_path_factory.mktemp("logs")
        with serve_in_thread(CLUSTER, log_dir=logs, reach=cuts.reach) as running:
            yield running


@pytest.fixture(scope="module")
def outcome(served: Served, preemptions: Path, cuts: CutProxies) -> Outcome:
    histories = [History.draw(seed, list(ROLES)) for seed in range(HISTORIES)]
    before = _totals(served)
    plan = Preemptions(rate=PREEMPTED, seed=1)
    plan.write(preemptions)
    cuts.rule = SomeCuts(seed=2, preemptions=plan)
    disturbed = asyncio.run(_run(served.url, histories, "disturbed"))
    # A worker adds up a call that was cut off when it has ended it, which the client does not see.
    assert_at_rest(served)
    after, failovers = _totals(served), cuts.cuts
    Preemptions().write(preemptions)
    cuts.rule = never
    undisturbed = asyncio.run(_run(served.url, histories, "undisturbed"))
    assert cuts.cuts == failovers
    return Outcome(
        disturbed,
        undisturbed,
        preemptions=after["preempted"] - before["preempted"],
        failovers=failovers,
        decode_prompt_tokens=after["prompt_tokens"] - before["prompt_tokens"],
    )


@pytest.fixture(scope="module")
def mismatches(outcome: Outcome) -> list[str]:
    """Answers that are not exact, or not those of the undisturbed run."""
    base, roles = store.resolve("tiny-base"), {r: store.resolve(m) for r, m in ROLES.items()}
    reference = Reference(base, roles)
    found = []
    for number, runs in enumerate(zip(outcome.disturbed, outcome.undisturbed, strict=True)):
        for turn, (call_, twin) in enumerate(zip(*runs, strict=True)):
            found += [
                f"history {number}, turn {turn}, {call_.body}: {problem}"
                for problem in _problems(reference, call_, twin)
            ]
            if call_.answer.token_ids != twin.answer.token_ids:
                break  # What follows in this session has another context.
    return found


def test_every_answer_is_exact(outcome: Outcome, mismatches: list[str]) -> None:
    assert mismatches == []
    assert outcome.preemptions > 20
    assert outcome.failovers > 20
    if os.environ.get(WRITE_ENV) == "1":
        figures = {
            "histories": HISTORIES,
            "mismatches": len(mismatches),
            "preemptions_injected": outcome.preemptions,
            "failovers_injected": outcome.failovers,
        }
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(figures, indent=2) + "\n")


def test_the_reference_tells_another_token(outcome: Outcome) -> None:
    """Or else the test before could not fail."""
    reference = Reference(store.resolve("tiny-base"), {"planner": store.resolve("tiny-a")})
    calls = [call_ for run in outcome.undisturbed for call_ in run if call_.step.role == "planner"]
    for call_ in calls[:20]:
        ids = [*call_.answer.token_ids]
        ids[-1] += 1 if ids[-1] < 200 else -1
        wrong = reference.first_wrong("planner", call_.answer.prompt_ids, ids, call_.grammar)
        assert wrong == len(ids) - 1


def test_every_interruption_was_resumed(outcome: Outcome) -> None:
    resumed = sum(call_.answer.report["resumed"] for run in outcome.disturbed for call_ in run)
    assert resumed == outcome.preemptions + outcome.failovers
    assert not any(call_.answer.report["resumed"] for run in outcome.undisturbed for call_ in run)


def test_decoders_compute_one_prompt_token_per_attempt(outcome: Outcome) -> None:
    attempts = 0
    for run in outcome.disturbed:
        for call_ in run:
            report = call_.answer.report
            attempts += 1 + report["resumed"]
            assert 1 <= report["decode_prompt_tokens_computed"] <= 1 + report["resumed"]
    assert outcome.decode_prompt_tokens == attempts


def test_usage_counts_what_the_client_got(outcome: Outcome) -> None:
    for run in outcome.disturbed:
        for call_ in run:
            answer = call_.answer
            assert answer.usage["completion_tokens"] == len(answer.token_ids)
            assert answer.usage["prompt_tokens"] == len(answer.prompt_ids)


def test_everything_is_at_rest_afterwards(served: Served, outcome: Outcome) -> None:
    assert_at_rest(served)


async def _run(url: str, histories: list[History], name: str) -> list[list[Call]]:
    gate = asyncio.Semaphore(AT_ONCE)
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:

        async def run(number: int, history: History) -> list[Call]:
            async def send(kind: Kind, body: Mapping[str, Any]) -> Answer:
                return await call(http, url, kind, body, f"{name}-{number}")

            async with gate:
                return [made async for made in history.run(send)]

        return await asyncio.gather(*(run(*each) for each in enumerate(histories)))


def _problems(reference: Reference, call_: Call, twin: Call) -> Iterator[str]:
    role, answer = call_.step.role, call_.answer
    prompt, ids = answer.prompt_ids, answer.token_ids
    if (at := reference.first_wrong(role, prompt, ids, call_.grammar)) is not None:
        yield f"token {at} of {ids} is not the likeliest, resumed {answer.report['resumed']} times"
    if prompt != twin.answer.prompt_ids:
        yield "another prompt than in the undisturbed run"
    elif not reference.same(role, prompt, ids, twin.answer.token_ids, call_.grammar):
        yield f"{ids}, undisturbed {twin.answer.token_ids}"


def _totals(served: Served) -> dict[str, int]:
    states = [state(served, worker.id) for worker in served.workers if worker.phase == "decode"]
    return {
        "preempted": sum(each["events"].get("preempted", 0) for each in states),
        "prompt_tokens": sum(each["prompt_tokens_computed"] for each in states),
    }
