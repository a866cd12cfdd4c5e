"""Every system on real engines: which tokens each computes, and that its workers say so."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefillshare_bench import adapters
from prefillshare_bench.records import CallRecord, Replay
from prefillshare_bench.replay import replay
from prefillshare_bench.setting import Running
from prefillshare_bench.systems import ROUTER_SYSTEMS, STOCK_SYSTEMS, SYSTEMS, Setting, start
from prefillshare_bench.traces import Call, Context, Session, Workload
from prefillshare_bench.worker_state import Peaks, Sampler, WorkerState
from prefillshare_server.models import adapter
from tests.reference import base_cache_greedy

# The first test of each system starts it.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WAIT_S = 120
"""For what has to be seen on a busy machine."""

BLOCK = 32
ROLES = ("planner", "critic")
CALLS = (
    Call(role="planner", new=100, tail=13, answer=9),
    Call(role="critic", new=40, tail=13, answer=9),
    Call(role="planner", new=40, tail=13, answer=9),
    Call(role="critic", new=40, tail=13, answer=9),
)
WORKLOAD = Workload(
    name="smoke",
    seed=3,
    roles=ROLES,
    head=16,
    sessions=tuple(Session(id=f"s{n}", arrival=n, calls=CALLS) for n in range(2)),
)
LONG = Workload(
    name="long",
    seed=4,
    roles=ROLES,
    sessions=(Session(id="s0", arrival=0, calls=(CALLS[0].model_copy(update={"answer": 200}),)),),
)
"""Its answer takes so long that it is seen."""
PROMPTS = (129, 178, 227, 276)
"""Tokens of each: head, history and tail."""
FOUND = {
    # 116 tokens are the first context, of which the second call finds the whole blocks, and so on.
    "once": (0, 96, 160, 192),
    # The third call finds what the first one left, and the fourth what the second did.
    "once per role": (0, 0, 96, 160),
}
"""Tokens that each call finds in the prefix cache."""
COMPUTED = {how: 2 * (sum(PROMPTS) - sum(found)) for how, found in FOUND.items()}
"""Over the calls of both sessions."""


@dataclass(frozen=True)
class Run:
    """A system that ran the workload once."""

    name: str
    replay: Replay
    before: list[WorkerState]
    after: list[WorkerState]
    rest: list[WorkerState]
    """After a long answer more."""
    at_work: Peaks
    """Sampled during a long answer."""
    at_rest: Peaks
    """Sampled after the last call."""

    @property
    def prefilled(self) -> dict[str, int]:
        """Tokens that each worker computed."""
        pairs = zip(self.before, self.after, strict=True)
        return {now.id: now.prefilled_tokens - was.prefilled_tokens for was, now in pairs}

    @property
    def by_session(self) -> list[list[CallRecord]]:
        return list(self.replay.sessions().values())


Runs = Callable[[str], Run]


def at_rest(running: Running) -> list[WorkerState]:
    """The workers once no call holds a block.

    Their counters also stand still while a busy machine keeps one from ending a lease.
    """
    deadline = time.monotonic() + WAIT_S
    found = running.workers()
    while any(worker.blocks_in_use for worker in found):
        assert time.monotonic() < deadline, found
        found = running.workers()
    return found


@pytest.fixture(scope="module")
def home(tiny_home: Path) -> Iterator[Path]:
    """The store of the tests also for the processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFILLSHARE_HOME", str(tiny_home))
        yield tiny_home


@pytest.fixture(scope="module")
def setting(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Two roles, so four workers."""
    drawn = adapters.draw("tiny-base", tmp_path_factory.mktemp("adapters"), ROLES)
    return Setting("tiny-base", ROLES, drawn, kv_blocks=4 * 40, block_size=BLOCK, max_model_len=512)


@pytest.fixture(scope="module")
def run(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Starts a system, has it run the workload and stops it; once each."""
    done: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name not in done:
            with start(name, setting, tmp_path_factory.mktemp(name)) as running:
                before = running.workers()
                replayed = asyncio.run(
                    replay(
                        WORKLOAD,
                        running.urls,
                        limit=2,
                        router=running.has_router,
                        next_role=name == "predictive",
                        call_s=600,
                    )
                )
                after = at_rest(running)
                with Sampler(running.places, (), interval_s=0.1) as working:
                    # Again for as long as it is over before it is seen, as on a busy machine.
                    deadline = time.monotonic() + WAIT_S
                    while not working.peaks().blocks_in_use and time.monotonic() < deadline:
                        asyncio.run(replay(LONG, running.urls, limit=1, router=running.has_router))
                rest = at_rest(running)
                with running.sampler() as resting:
                    pass
                done[name] = Run(
                    name, replayed, before, after, rest, working.peaks(), resting.peaks()
                )
        return done[name]

    return run


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_call_is_answered_with_as_many_tokens_as_the_workload_says(
    run: Runs, name: str
) -> None:
    for calls in run(name).by_session:
        assert [(call.error, call.prompt_tokens) for call in calls] == [(None, n) for n in PROMPTS]
        assert [call.generated for call in calls] == [call.answer for call in CALLS]


def test_prefillshare_computes_each_context_token_once(run: Runs) -> None:
    ran = run("prefillshare")
    for calls in ran.by_session:
        assert tuple(call.cached_tokens for call in calls) == FOUND["once"]
    assert sum(ran.prefilled.values()) == COMPUTED["once"]


@pytest.mark.parametrize("name", ["per_model", "shared_pool", *STOCK_SYSTEMS])
def test_a_baseline_computes_each_context_token_once_per_role(run: Runs, name: str) -> None:
    ran = run(name)
    for calls in ran.by_session:
        assert tuple(call.cached_tokens for call in calls) == FOUND["once per role"]
    assert sum(ran.prefilled.values()) == COMPUTED["once per role"]


def test_a_predictive_baseline_hides_what_it_computes_all_the_same(run: Runs) -> None:
    ran = run("predictive")
    for calls in ran.by_session:
        assert tuple(call.cached_tokens for call in calls) == FOUND["once"]
    assert sum(ran.prefilled.values()) >= COMPUTED["once per role"]


@pytest.mark.parametrize("name", ["prefillshare", "per_model", "shared_pool", *STOCK_SYSTEMS])
def test_workers_count_what_calls_are_told(run: Runs, name: str) -> None:
    ran = run(name)
    told = sum(call.computed_tokens or 0 for call in ran.replay.calls)
    assert sum(ran.prefilled.values()) == told


@pytest.mark.parametrize("name", ["prefillshare", "shared_pool"])
def test_a_session_stays_with_one_of_the_shared_prefill_workers(run: Runs, name: str) -> None:
    ran = run(name)
    used = {(call.session, call.prefill_worker) for call in ran.replay.calls}
    assert sorted(worker or "" for _, worker in used) == ["prefill-0", "prefill-1"]
    assert ran.prefilled["prefill-0"] == ran.prefilled["prefill-1"]


@pytest.mark.parametrize("name", ["per_model", "predictive"])
def test_a_role_has_a_prefill_worker_of_its_own(run: Runs, name: str) -> None:
    for call in run(name).replay.calls:
        assert call.prefill_worker == f"prefill-{call.role}-0"


def test_a_session_stays_with_one_of_a_roles_engines(run: Runs) -> None:
    calls = run("aggregated").replay.calls
    used = {(call.session, call.role, call.prefill_worker) for call in calls}
    assert len(used) == len({engine for _, _, engine in used}) == 4


@pytest.mark.parametrize("name", SYSTEMS)
def test_workers_are_equal_and_at_rest_hold_nothing_but_caches(
    run: Runs, setting: Setting, name: str
) -> None:
    ran = run(name)
    workers = 1 if name == "multi_lora" else setting.workers
    assert [worker.blocks for worker in ran.after] == [setting.kv_blocks // workers - 1] * workers
    assert [worker.blocks_in_use for worker in ran.after] == [0] * workers
    assert [worker.preemptions for worker in ran.after] == [0] * workers
    assert {worker.bytes_per_block for worker in ran.after} == {setting.bytes_per_block}
    assert ran.at_rest.samples > 0
    assert ran.at_rest.blocks_in_use == 0
    assert ran.at_rest.rss_bytes > 0


@pytest.mark.parametrize("name", ROUTER_SYSTEMS)
def test_workers_tell_what_their_caches_hold(run: Runs, name: str) -> None:
    ran = run(name)
    assert min(worker.cached_blocks or 0 for worker in ran.after) > 0
    held = [worker.cached_blocks or 0 for worker in ran.rest]
    assert ran.at_rest.cached_blocks == sum(held)


@pytest.mark.exactness
def test_prefillshares_tokens_are_those_of_each_role_on_the_bases_kv(
    run: Runs, setting: Setting, home: Path
) -> None:
    decoders = {
        role: adapter.merged(setting.base_dir, path) for role, path in setting.adapters.items()
    }
    answers = run("prefillshare").replay.sessions()
    for session in WORKLOAD.sessions:
        context = Context(WORKLOAD, session)
        for index, call in enumerate(CALLS):
            prompt, decoder = context.prompt(index), decoders[call.role]
            expected = base_cache_greedy(setting.base_dir, decoder, prompt, call.answer)
            assert list(answers[session.id][index].ids or ()) == expected
            # On KV of its own the role would have answered otherwise.
            assert base_cache_greedy(decoder, decoder, prompt, call.answer) != expected
            context.answered(index, expected)


@pytest.mark.parametrize("name", SYSTEMS)
def test_kv_in_use_is_seen_while_calls_run(run: Runs, name: str) -> None:
    peaks = run(name).at_work
    assert peaks.blocks_in_use > 0
    assert peaks.kv_bytes % peaks.blocks_in_use == 0


@pytest.mark.parametrize("name", ROUTER_SYSTEMS)
def test_decode_workers_tell_how_long_handoffs_took(run: Runs, name: str) -> None:
    decode = [worker for worker in run(name).after if worker.phase == "decode"]
    assert min(worker.handoffs for worker in decode) > 0
    assert min(worker.handoff_seconds for worker in decode) > 0
