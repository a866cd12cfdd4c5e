"""Prefill is repeated where that helps, and leaves no lease behind wherever it ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
from pydantic_core import to_json
from tokenizers import Tokenizer

from prefillshare_server.router.ask import parse
from prefillshare_server.router.errors import NoWorker, RouterError
from prefillshare_server.router.handoff import Handoff, Prompt, Reader
from prefillshare_server.router.health import Health
from prefillshare_server.router.identity import Identity
from prefillshare_server.router.leases import Leases
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.placement import Placement, Reserved
from prefillshare_server.router.prefill import Prefill
from prefillshare_server.router.prefill_calls import ATTEMPTS, PrefillCalls
from prefillshare_server.router.sessions import Session, Sessions
from prefillshare_server.router.topology import Decoder, WorkerEndpoint
from prefillshare_server.router.workers import Workers
from tests.mocks.mock_decode import MockDecode
from tests.mocks.mock_workers import MockCluster, MockPrefill, PrefillFault, running
from tests.router.conftest import until

PROMPT = Prompt(ids=list(range(40)), context_tokens=40)
ROLES = {"a": Decoder("a", "a")}
ASK = parse("chat", to_json({"model": "a", "messages": []}), {}, roles=ROLES, base_name="base")


@dataclass
class Site:
    """The prefill part of a router over mock workers."""

    workers: list[MockPrefill]
    reader_worker: MockDecode
    cluster: MockCluster
    health: Health
    placement: Placement
    sessions: Sessions
    metrics: Metrics
    prefill: Prefill

    def readers(self, n: int = 1) -> list[Reader]:
        place = Reserved(self.reader_worker.endpoint, 0, "a")
        return [Reader(index, index, PROMPT, place) for index in range(n)]

    async def handoff(self, session: Session | None = None) -> Handoff:
        """Prefill for one reader that takes the lease."""
        async with self.prefill.handoffs(ASK, session, self.readers()) as [handoff]:
            handoff.taken = True
            self.cluster.leases.pop(handoff.params["remote_request_id"])
            return handoff

    def tries(self) -> list[int]:
        return [len(worker.requests) for worker in self.workers]

    def metric(self, line: str) -> float:
        text = self.metrics.render().decode()
        found = [each for each in text.splitlines() if each.startswith(line)]
        return sum(float(each.rpartition(" ")[2]) for each in found)


@asynccontextmanager
async def site(
    tokenizer: Tokenizer,
    *,
    prefill: int = 1,
    affinity: Literal["soft", "hard"] = "soft",
    queue_s: float = 120.0,
    timeout_s: float = 120.0,
) -> AsyncIterator[Site]:
    """Start one; on leaving, nothing may be held anywhere."""
    cluster = MockCluster(tokenizer)
    workers = [MockPrefill(cluster, f"p{i}") for i in range(prefill)]
    reader_worker = MockDecode(cluster, "a0", "a")
    async with running(*workers, reader_worker), Workers() as client:
        endpoints: list[WorkerEndpoint] = [w.endpoint for w in (*workers, reader_worker)]
        metrics, sessions = Metrics(), Sessions(1800)
        health = Health(client, endpoints, metrics, clock_skew_s=1.0, backoff_s=(0.02, 0.1))
        placement = Placement(
            endpoints, sessions.pinned, available=health.available, affinity=affinity
        )
        calls = PrefillCalls(
            client,
            health,
            placement,
            sessions,
            metrics,
            timeout_s=timeout_s,
            queue_s=queue_s,
        )
        part = Prefill(calls, Leases(client), health, placement, metrics, timeout_s=timeout_s)
        async with health:
            yield Site(workers, reader_worker, cluster, health, placement, sessions, metrics, part)
            await part.close()
        assert cluster.leases == {}
        assert cluster.violations == []
        assert placement.prefilling.total() == 0
        assert [part.in_hand(worker.id) for worker in workers] == [0] * prefill


@asynccontextmanager
async def opened(where: Site, name: str = "s") -> AsyncIterator[Session]:
    with where.sessions.opened(Identity(name, None, False)) as session:
        assert session is not None
        yield session


@pytest.mark.parametrize("fault", ["drop", "status_500", "no_blocks"])
async def test_a_failed_prefill_is_repeated_on_a_worker_that_was_not_tried(
    tokenizer: Tokenizer, fault: Any
) -> None:
    async with site(tokenizer, prefill=2) as where:
        where.workers[0].fault = fault
        handoff = await where.handoff()
        assert handoff.placed.worker.id == "p1"
        assert where.tries() == [1, 1]
        assert where.metric("prefillshare_retries_total") == 1


@pytest.mark.parametrize("fault", ["drop", "status_500", "no_blocks"])
async def test_the_only_worker_is_tried_again_under_another_request_id(
    tokenizer: Tokenizer, fault: Any
) -> None:
    async with site(tokenizer) as where:
        where.workers[0].fault = fault
        where.workers[0].faulty_calls = 1
        handoff = await where.handoff()
        assert where.tries() == [2]
        assert where.workers[0].request_ids[-1] == handoff.request_id
        assert len(set(where.workers[0].request_ids)) == 2


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("drop", 503, "worker_unreachable"),
        ("status_500", 502, "prefill_failed"),
        ("no_blocks", 502, "kv_handoff_missing"),
    ],
)
async def test_after_three_calls_the_last_failure_is_the_clients(
    tokenizer: Tokenizer, fault: Any, status: int, code: str
) -> None:
    async with site(tokenizer, prefill=2) as where:
        for worker in where.workers:
            worker.fault = fault
        with pytest.raises(RouterError) as raised:
            await where.handoff()
        assert (raised.value.status, raised.value.code) == (status, code)
        assert sum(where.tries()) == ATTEMPTS
        assert min(where.tries()) == 1


@pytest.mark.parametrize("fault", ["status_400", "hang"])
async def test_a_client_error_and_a_silent_worker_are_not_tried_again(
    tokenizer: Tokenizer, fault: Any
) -> None:
    silent = fault == "hang"
    async with site(tokenizer, prefill=2, timeout_s=0.2 if silent else 120.0) as where:
        for worker in where.workers:
            worker.fault = fault
        with pytest.raises(RouterError) as raised:
            await where.handoff()
        assert raised.value.status == (504 if silent else 400)
        # On a slow machine a call's time may be over before a worker has it.
        assert sum(where.tries()) <= 1
        assert where.metric("prefillshare_retries_total") == 0


async def test_client_errors_leave_the_worker_up_and_three_silent_calls_do_not(
    tokenizer: Tokenizer,
) -> None:
    async with site(tokenizer) as where:
        await until(lambda: where.health.facts["p0"].engine_id)
        where.workers[0].unhealthy = True  # What is open stays open.
        states = []
        faults: list[tuple[PrefillFault, float]] = [("status_400", 120.0), ("hang", 0.05)]
        for fault, timeout_s in faults:
            where.workers[0].fault = fault
            where.prefill._calls._timeout_s = timeout_s
            for _ in range(3):
                with pytest.raises(RouterError):
                    await where.handoff()
                states.append(where.health.state("p0"))
        assert states == ["up"] * 5 + ["open"]


@pytest.mark.parametrize("fault", ["drop", "status_500", "no_blocks", "hang"])
async def test_a_call_that_may_have_a_lease_is_given_up_by_its_request_id(
    tokenizer: Tokenizer, fault: Any
) -> None:
    async with site(tokenizer, timeout_s=0.2 if fault == "hang" else 120.0) as where:
        worker = where.workers[0]
        worker.fault = fault
        # On a slow machine a call's time may be over before the worker has it.
        while not worker.request_ids:
            with pytest.raises(RouterError):
                await where.handoff()
        await where.prefill.close()
        released = [each for each in worker.released if each in worker.request_ids]
        assert sorted(released) == sorted(worker.request_ids)


async def test_a_refused_prompt_and_a_dead_worker_have_no_lease_to_give_up(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with site(tokenizer, queue_s=0.1) as where:
        where.workers[0].fault = "status_400"
        with pytest.raises(RouterError):
            await where.handoff()
        await where.prefill.close()
        assert where.workers[0].released == []
        await where.workers[0].stop()
        with pytest.raises(NoWorker):
            await where.handoff()
        await where.prefill.close()
        assert "left to end" not in caplog.text


async def test_a_lease_granted_as_the_call_times_out_is_given_back(tokenizer: Tokenizer) -> None:
    async with site(tokenizer, timeout_s=0.1) as where:
        where.workers[0].fault = "grant_unseen"
        while not where.workers[0].request_ids:
            with pytest.raises(RouterError):
                await where.handoff()
        await where.prefill.close()
        await until(lambda: not where.cluster.leases)


async def test_a_cancelled_prefill_is_given_up_at_once(tokenizer: Tokenizer) -> None:
    async with site(tokenizer) as where:
        where.workers[0].fault = "hang"
        task = asyncio.create_task(where.handoff())
        await until(lambda: where.tries() == [1])
        assert where.prefill.in_hand("p0") == 1
        task.cancel()
        await asyncio.wait([task])
        await where.prefill.close()
        assert where.workers[0].released == where.workers[0].request_ids


async def test_what_nobody_took_is_released_at_the_end_and_what_was_read_is_not(
    tokenizer: Tokenizer,
) -> None:
    async with site(tokenizer) as where:
        readers = where.readers(3)
        async with where.prefill.handoffs(ASK, None, readers) as handoffs:
            assert where.prefill.in_hand("p0") == 3
            handoffs[1].taken = handoffs[1].over = True
            where.cluster.leases.pop(handoffs[1].params["remote_request_id"])
            again = await where.prefill.again(ASK, None, readers[0])
            assert where.prefill.in_hand("p0") == 4
        await where.prefill.close()
        left = {handoffs[0].request_id, handoffs[2].request_id, again.request_id}
        assert set(where.workers[0].released) == left


async def test_again_prefills_the_same_prompt_for_the_worker_the_reader_moved_to(
    tokenizer: Tokenizer,
) -> None:
    async with site(tokenizer) as where:
        [reader] = where.readers()
        async with where.prefill.handoffs(ASK, None, [reader]) as [first]:
            moved_to = WorkerEndpoint("a1", "decode", "a", "http://127.0.0.1:1", "a")
            reader.place = Reserved(moved_to, 0, "a")
            again = await where.prefill.again(ASK, None, reader)
            assert (first.worker.id, again.worker.id) == ("a0", "a1")
            assert again.request_id != first.request_id
            bodies = where.workers[0].requests
            assert bodies[0]["prompt"] == bodies[1]["prompt"] == PROMPT.ids


async def test_a_release_is_repeated_until_the_worker_takes_it(
    tokenizer: Tokenizer,
) -> None:
    async with site(tokenizer) as where:
        worker = where.workers[0]
        worker.failing_releases = 1
        async with where.prefill.handoffs(ASK, None, where.readers()) as [handoff]:
            pass
        await where.prefill.close()
        assert (worker.failing_releases, worker.released) == (0, [handoff.request_id])


async def test_a_release_that_keeps_failing_is_logged_and_left_to_the_lease(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with site(tokenizer) as where:
        where.workers[0].failing_releases = 99
        async with where.prefill.handoffs(ASK, None, where.readers()):
            pass
        await where.prefill.close()
        assert "a lease on p0 is left to end by itself" in caplog.text
        where.cluster.leases.clear()


@pytest.mark.parametrize("reader", ["has it", "never got it", "is dead", "cannot be reached"])
async def test_a_handoff_that_was_sent_is_released_only_if_nobody_reads_it(
    tokenizer: Tokenizer, reader: str
) -> None:
    async with site(tokenizer) as where:
        async with where.prefill.handoffs(ASK, None, where.readers()) as [handoff]:
            handoff.taken = True
            if reader == "has it":
                where.reader_worker.begun.add(handoff.request_id)
            elif reader == "is dead":
                await where.reader_worker.stop()
            elif reader == "cannot be reached":
                # Unlike a name that does not exist, it takes no look-up.
                handoff.worker = replace(handoff.worker, url="http://255.255.255.255:1")
        await where.prefill.close()
        may_read = reader in ("has it", "cannot be reached")
        released = [] if may_read else [handoff.request_id]
        assert where.workers[0].released == released
        where.cluster.leases.clear()


async def test_a_handoff_is_given_back_once(tokenizer: Tokenizer) -> None:
    async with site(tokenizer) as where:
        async with where.prefill.handoffs(ASK, None, where.readers()) as [handoff]:
            where.prefill.give_back(handoff)
        await where.prefill.close()
        assert where.workers[0].released == [handoff.request_id]


async def test_a_prefill_worker_whose_kv_could_not_be_read_is_avoided(tokenizer: Tokenizer) -> None:
    async with (
        site(tokenizer, prefill=2) as where,
        opened(where) as session,
        where.prefill.handoffs(ASK, session, where.readers()) as [handoff],
    ):
        assert handoff.placed.worker.id == "p0"
        again = await where.prefill.again(ASK, session, handoff.reader, avoid={"p0"})
        assert (again.placed.worker.id, again.placed.affinity) == ("p1", "rebound")


async def test_a_call_waits_for_a_worker_to_come_back(tokenizer: Tokenizer) -> None:
    async with site(tokenizer) as where:
        await where.workers[0].stop()
        task = asyncio.create_task(where.handoff())
        await until(lambda: where.health.state("p0") == "open")
        await asyncio.sleep(0.1)
        assert not task.done()
        await where.workers[0].start()
        assert (await task).placed.worker.id == "p0"


async def test_without_a_worker_in_time_it_is_a_503_that_says_why(tokenizer: Tokenizer) -> None:
    async with site(tokenizer, prefill=2, queue_s=0.1) as where:
        where.health.drain("p0")
        await where.workers[1].stop()
        with pytest.raises(NoWorker) as raised:
            await where.handoff()
        assert raised.value.message.startswith("no prefill worker was available within 0.1 s")
        assert "p0: draining" in raised.value.message
        assert "p1: could not be reached" in raised.value.message
        assert int(raised.value.headers["Retry-After"]) > 0


async def test_a_hard_pin_waits_for_its_worker_while_another_is_idle(tokenizer: Tokenizer) -> None:
    async with site(tokenizer, prefill=2, affinity="hard") as where, opened(where) as session:
        assert (await where.handoff(session)).placed.worker.id == "p0"
        await where.workers[0].stop()
        task = asyncio.create_task(where.handoff(session))
        await until(lambda: where.health.state("p0") == "open")
        await where.workers[0].start()
        again = await task
        assert (again.placed.worker.id, again.placed.affinity) == ("p0", "hit")
        assert where.tries()[1] == 0


async def test_a_hard_pin_that_stays_away_is_named(tokenizer: Tokenizer) -> None:
    where_options: dict[str, Any] = {"prefill": 2, "affinity": "hard", "queue_s": 0.1}
    async with site(tokenizer, **where_options) as where, opened(where) as session:
        await where.handoff(session)
        where.health.drain("p0")
        with pytest.raises(NoWorker, match=r"prefill worker p0, to which router\.affinity"):
            await where.handoff(session)


@pytest.mark.parametrize(
    ("away", "reason"),
    [("dead", "worker_unreachable"), ("drained", "draining"), ("status_500", "worker_failed")],
)
async def test_a_soft_pin_moves_and_the_reason_is_counted(
    tokenizer: Tokenizer, away: Any, reason: str
) -> None:
    async with site(tokenizer, prefill=2) as where, opened(where) as session:
        await where.handoff(session)
        if away == "dead":
            await where.workers[0].stop()
        elif away == "drained":
            where.health.drain("p0")
        else:
            where.workers[0].fault = away
        moved = await where.handoff(session)
        assert (moved.placed.worker.id, moved.placed.affinity) == ("p1", "rebound")
        assert session.prefill_worker == "p1"
        assert where.sessions.pinned == {"p0": 0, "p1": 1}
        assert where.metric("prefillshare_session_rebinds_total") == 1
        assert where.metric(f'prefillshare_session_rebinds_total{{reason="{reason}"}}') == 1


async def test_the_facts_of_a_restarted_worker_decide_how_many_prompts_fit(
    tokenizer: Tokenizer,
) -> None:
    async with site(tokenizer) as where:
        await until(lambda: where.health.facts["p0"].engine_id)
        where.health._note(where.workers[0].endpoint, {"num_blocks": 4})
        with pytest.raises(RouterError, match="the prefill worker has 3"):
            async with where.prefill.handoffs(ASK, None, where.readers(2)):
                pass
