"""When a worker gets no calls, and how it gets them again."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tokenizers import Tokenizer

from prefillshare_server.router.errors import (
    RouterError,
    WorkerRefused,
    WorkerUnreachable,
    timed_out,
    worker_failed,
)
from prefillshare_server.router.health import FAILURES, Health
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.router.workers import Workers
from tests.mocks.mock_workers import BLOCK, MockCluster, MockPrefill, running
from tests.router.conftest import WAIT_S, Bench, Start, until

P0 = WorkerEndpoint("p0", "prefill", None, "http://127.0.0.1:1", "base")
P1 = WorkerEndpoint("p1", "prefill", None, "http://127.0.0.1:2", "base")

REFUSED = WorkerUnreachable("p0", "prefill", "refused", sent=False)
BROKEN = WorkerRefused("p0", 500, {})


def idle(*workers: WorkerEndpoint) -> Health:
    """Health that nobody entered: nothing probes."""
    return Health(Workers(), workers or (P0, P1), Metrics(), clock_skew_s=1.0)


@asynccontextmanager
async def probing(
    tokenizer: Tokenizer, worker: MockPrefill | None = None, **options: Any
) -> AsyncIterator[tuple[Health, MockPrefill, Metrics]]:
    """Health that probes one mock worker."""
    worker = worker or MockPrefill(MockCluster(tokenizer), "p0")
    metrics = Metrics()
    options = {"clock_skew_s": 1.0, "backoff_s": (0.01, 0.05), **options}
    async with (
        running(worker),
        Workers() as client,
        Health(client, [worker.endpoint], metrics, **options) as health,
    ):
        yield health, worker, metrics


@asynccontextmanager
async def probed(
    tokenizer: Tokenizer,
) -> AsyncIterator[tuple[Health, MockPrefill, Callable[[], Awaitable[None]]]]:
    """Health of one mock worker, which it asks when the test says so."""
    worker = MockPrefill(MockCluster(tokenizer), "p0")
    async with running(worker), Workers() as client:
        health = Health(client, [worker.endpoint], Metrics(), clock_skew_s=1.0)
        yield health, worker, lambda: health._probe(health._circuit("p0"))


def test_a_broken_connection_opens_at_once_and_only_that_worker() -> None:
    health = idle()
    health.failed(P0, REFUSED)
    assert (health.state("p0"), health.state("p1")) == ("open", "up")
    assert not health.available("p0")
    assert health.why_not("p0") == "could not be reached: refused"


@pytest.mark.parametrize("error", [BROKEN, timed_out("prefill", "p0", 1.0)])
def test_other_failures_open_after_three_in_a_row(error: RouterError) -> None:
    health = idle()
    for _ in range(FAILURES - 1):
        health.failed(P0, error)
    health.succeeded(P0)
    for _ in range(FAILURES - 1):
        health.failed(P0, error)
    assert health.state("p0") == "up"
    health.failed(P0, error)
    assert health.state("p0") == "open"


def test_client_errors_never_open_also_where_they_are_passed_on_as_the_routers() -> None:
    health = idle()
    refused = WorkerRefused("p0", 400, {})
    passed_on = worker_failed(refused, "p0", "prefill")
    passed_on.__cause__ = refused
    for _ in range(10):
        health.failed(P0, refused)
        health.failed(P0, passed_on)
    assert health.state("p0") == "up"


def test_a_success_of_an_older_call_does_not_close() -> None:
    health = idle()
    health.failed(P0, REFUSED)
    health.succeeded(P0)
    assert health.state("p0") == "open"


def test_a_draining_worker_is_not_available_until_that_ends() -> None:
    health = idle()
    health.drain("p0")
    assert (health.state("p0"), health.available("p0")) == ("draining", False)
    health.undrain("p0")
    assert health.available("p0")


def test_an_unknown_worker_is_a_404_that_lists_those_there_are() -> None:
    with pytest.raises(RouterError, match="p0, p1") as raised:
        idle().drain("p7")
    assert (raised.value.status, raised.value.code) == (404, "worker_not_found")


def test_listeners_hear_every_change_and_nothing_else() -> None:
    health = idle()
    heard: list[str] = []
    health.listen(lambda: heard.append(health.state("p0")))
    health.failed(P0, BROKEN)
    health.failed(P0, REFUSED)
    health.failed(P0, REFUSED)
    health.drain("p0")
    health.drain("p0")
    health.undrain("p0")
    assert heard == ["open", "draining", "open"]


async def test_changed_wakes_all_waiters_and_gives_up_in_time() -> None:
    health = idle()
    waiting = [asyncio.create_task(health.changed(10 * WAIT_S)) for _ in range(2)]
    await asyncio.sleep(0)
    health.drain("p0")
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*waiting)
        await health.changed(0.01)


async def test_a_probe_closes_what_failed(tokenizer: Tokenizer) -> None:
    async with probing(tokenizer) as (health, worker, metrics):
        health.failed(worker.endpoint, REFUSED)
        assert b'prefillshare_worker_up{worker="p0"} 0.0' in metrics.render()
        await until(lambda: health.state("p0") == "up")
        assert b'prefillshare_worker_up{worker="p0"} 1.0' in metrics.render()
        assert b'prefillshare_circuit_opened_total{worker="p0"} 1.0' in metrics.render()


async def test_a_sick_worker_stays_open_until_its_health_is_back(tokenizer: Tokenizer) -> None:
    async with probing(tokenizer) as (health, worker, _):
        worker.unhealthy = True
        health.failed(worker.endpoint, REFUSED)
        await asyncio.sleep(0.2)
        assert health.state("p0") == "open"
        worker.unhealthy = False
        await until(lambda: health.state("p0") == "up")


async def test_probes_in_vain_open_after_three_in_a_row(tokenizer: Tokenizer) -> None:
    async with probed(tokenizer) as (health, worker, probe):
        for sick in [True, True, False] * FAILURES + [True] * (FAILURES - 1):
            worker.unhealthy = sick
            await probe()
            assert health.state("p0") == "up"
        await probe()
        assert health.state("p0") == "open"


async def test_a_worker_that_is_well_and_fails_every_call_is_opened(tokenizer: Tokenizer) -> None:
    async with probed(tokenizer) as (health, worker, probe):
        for _ in range(FAILURES):
            assert health.state("p0") == "up"
            await probe()
            health.failed(worker.endpoint, BROKEN)
        assert health.state("p0") == "open"


async def test_a_drained_worker_that_comes_back_stays_drained(tokenizer: Tokenizer) -> None:
    async with probing(tokenizer) as (health, worker, _):
        health.drain("p0")
        health.failed(worker.endpoint, REFUSED)
        assert health.why_not("p0") == "draining"
        await until(lambda: not health.failing("p0"))
        assert health.state("p0") == "draining"
        health.undrain("p0")
        assert health.available("p0")


async def test_probes_pause_longer_and_longer_up_to_the_limit(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    jitter = itertools.cycle([1.0, 0.0]).__next__
    options: dict[str, Any] = {"backoff_s": (0.2, 5.0), "jitter": jitter}
    async with probing(tokenizer, **options) as (health, worker, _):
        await until(lambda: health.facts["p0"].engine_id)
        await worker.stop()
        monkeypatch.setattr("prefillshare_server.router.health.asyncio.sleep", noted)
        health.failed(worker.endpoint, REFUSED)
        while len(pauses) < 8:
            await sleep(0.005)
        monkeypatch.undo()
    assert pauses[:8] == pytest.approx([0.2, 0.2, 0.8, 0.8, 3.2, 2.5, 5.0, 2.5])


async def test_a_worker_that_fails_again_after_each_probe_is_asked_less_and_less(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    options: dict[str, Any] = {"backoff_s": (0.05, 10.0), "jitter": lambda: 1.0}
    async with probing(tokenizer, **options) as (health, worker, _):
        await until(lambda: health.facts["p0"].engine_id)
        monkeypatch.setattr("prefillshare_server.router.health.asyncio.sleep", noted)
        for failures in range(1, 6):
            if failures == 5:
                health.succeeded(worker.endpoint)
            health.failed(worker.endpoint, REFUSED)
            while health.state("p0") != "up":
                await sleep(0.005)
        monkeypatch.undo()
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.05])


@pytest.mark.parametrize(
    ("off_s", "state", "word"),
    [(5.0, "open", "ahead of"), (-5.0, "open", "behind"), (0.5, "up", None), (-0.5, "up", None)],
)
async def test_a_worker_with_a_wrong_clock_gets_no_calls(
    tokenizer: Tokenizer, off_s: float, state: str, word: str | None
) -> None:
    worker = MockPrefill(MockCluster(tokenizer), "p0")
    worker.clock = lambda: 1000.0 + off_s
    async with probing(tokenizer, worker, clock=lambda: 1000.0) as (health, _, _):
        await until(lambda: health.facts["p0"].engine_id or health.why_not("p0"))
        assert health.state("p0") == state
        if word is not None:
            why = health.why_not("p0")
            assert why is not None
            assert f"5.0 s {word} the router's" in why
            worker.clock = lambda: 1000.0
            await until(lambda: health.state("p0") == "up")


async def test_the_round_trip_is_not_taken_for_a_wrong_clock(tokenizer: Tokenizer) -> None:
    """The router's clock passes 10 s while the worker answers with the time in between."""
    worker = MockPrefill(MockCluster(tokenizer), "p0")
    worker.clock = lambda: 1005.0
    ticks = itertools.cycle([1000.0, 1010.0]).__next__
    async with probing(tokenizer, worker, clock=ticks) as (health, _, _):
        await until(lambda: health.facts["p0"].engine_id or health.why_not("p0"))
        assert health.state("p0") == "up"


async def test_a_restarted_worker_has_new_facts_and_is_logged(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with probing(tokenizer) as (health, worker, _):
        await until(lambda: health.facts["p0"].engine_id == "p0/1")
        await worker.stop()
        health.failed(worker.endpoint, REFUSED)
        worker.num_blocks = 77
        await worker.start()
        await until(lambda: health.facts["p0"].engine_id == "p0/2")
        facts = health.facts["p0"]
        assert (facts.block_size, facts.num_blocks) == (BLOCK, 77)
        assert "worker p0 was restarted: engine p0/2, 77 KV blocks" in caplog.text


async def test_facts_of_the_launcher_stay_where_the_worker_says_none(tokenizer: Tokenizer) -> None:
    worker = MockPrefill(MockCluster(tokenizer), "p0")
    async with running(worker):
        endpoint = worker.endpoint
    health = idle(endpoint)
    assert health.facts["p0"].num_blocks == endpoint.num_blocks
    health._note(endpoint, {"num_blocks": None, "block_size": "x", "engine_id": "e"})
    assert health.facts["p0"].num_blocks == endpoint.num_blocks
    assert health.facts["p0"].block_size == BLOCK


async def test_nothing_probes_once_it_is_left(tokenizer: Tokenizer) -> None:
    before = asyncio.all_tasks()
    async with probing(tokenizer):
        assert len(asyncio.all_tasks() - before) > 0
    assert not {task for task in asyncio.all_tasks() - before if "Health" in repr(task)}


async def test_workers_are_listed_with_what_they_have_in_hand(bench: Bench) -> None:
    worker = bench.decode["alpha-0"]
    worker.pace = asyncio.Semaphore(0)
    call = asyncio.create_task(bench.stream(max_tokens=20))
    await until(lambda: worker.open_requests)
    _, listed = await bench.get("/v1/workers")
    workers = {each["id"]: each for each in listed["data"]}
    assert list(workers) == ["prefill-0", "alpha-0", "beta-0"]
    prompt = len(bench.prefill[0].requests[0]["prompt"])
    assert workers["alpha-0"] == {
        "id": "alpha-0",
        "object": "prefillshare.worker",
        "phase": "decode",
        "pool": "alpha",
        "roles": ["alpha"],
        "state": "up",
        "reason": None,
        "in_flight": 1,
        "reserved_blocks": -(-(prompt + 20) // BLOCK),
        "blocks": worker.num_blocks,
    }
    assert workers["prefill-0"]["in_flight"] == 1
    assert workers["beta-0"]["in_flight"] == workers["beta-0"]["reserved_blocks"] == 0
    for _ in range(100):
        worker.pace.release()
    await call
    assert not await bench.settled()


async def test_a_drained_replica_gets_nothing_new_and_a_session_leaves_a_drained_worker(
    start: Start,
) -> None:
    async with start(prefill=2, decode=("alpha-0", "alpha-1")) as bench:
        _, first, _ = await bench.chat(headers={"X-Session-ID": "s"})
        homes = [first["prefillshare"][f"{phase}_worker"] for phase in ("prefill", "decode")]
        for worker_id in homes:
            async with bench.http.post(f"{bench.url}/v1/workers/{worker_id}/drain") as response:
                assert (response.status, (await response.json())["state"]) == (200, "draining")
        _, second, _ = await bench.chat(headers={"X-Session-ID": "s"})
        assert second["prefillshare"]["prefill_worker"] != homes[0]
        assert second["prefillshare"]["decode_worker"] != homes[1]
        reason = 'prefillshare_session_rebinds_total{reason="draining"}'
        assert await bench.metric(reason) == 1
        async with bench.http.delete(f"{bench.url}/v1/workers/{homes[0]}/drain") as response:
            assert (await response.json())["state"] == "up"


async def test_draining_an_unknown_worker_is_a_404_that_lists_them(bench: Bench) -> None:
    status, body, _ = await bench.post("/v1/workers/nobody/drain", {})
    assert (status, body["error"]["code"]) == (404, "worker_not_found")
    assert "alpha-0" in body["error"]["message"]


async def test_a_probe_that_gets_nonsense_does_not_end_probing(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    worker = MockPrefill(MockCluster(tokenizer), "p0")
    worker.clock = lambda: "yesterday"  # type: ignore[assignment,return-value]
    async with probing(tokenizer, worker) as (health, _, _):
        health.failed(worker.endpoint, REFUSED)
        await until(lambda: health.state("p0") == "up")
        assert "worker p0 gets calls again" in caplog.text
