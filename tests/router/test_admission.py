"""Room on the decode workers: who gets it, who waits, and that all of it is given back."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from prefillshare_server.router.admission import Admission
from prefillshare_server.router.ask import Ask, parse
from prefillshare_server.router.errors import NoWorker, RouterError, WorkerUnreachable
from prefillshare_server.router.handoff import Prompt, Reader
from prefillshare_server.router.health import Health
from prefillshare_server.router.ledger import Ledger
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.placement import Placement
from prefillshare_server.router.sessions import Session
from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.router.turns import Turns
from prefillshare_server.router.workers import Workers
from tests.router.conftest import Start

BLOCK = 16
CAPACITY = 10
"""Blocks of each worker that requests can have."""


def worker(worker_id: str, role: str, capacity: int = CAPACITY) -> WorkerEndpoint:
    blocks = capacity + 1 if capacity else 0
    return WorkerEndpoint(worker_id, "decode", role, "http://w", role, BLOCK, 1, blocks)


class Room:
    """Admission to workers a0, a1 (role a) and b0 (role b), or to others."""

    def __init__(
        self, *workers: WorkerEndpoint, queue_s: float = 30.0, reserve_tokens: int = 64
    ) -> None:
        workers = workers or (worker("a0", "a"), worker("a1", "a"), worker("b0", "b"))
        self.metrics = Metrics()
        self.health = Health(Workers(), workers, self.metrics, clock_skew_s=1.0)
        self.placement = Placement(
            workers, Counter(), available=self.health.available, affinity="soft"
        )
        self.admission = Admission(
            self.placement,
            self.health,
            self.metrics,
            queue_s=queue_s,
            reserve_tokens=reserve_tokens,
            max_model_len=4096,
        )

    def call(self, blocks: int, **options: Any) -> "Call":
        return Call(self, blocks, **options)

    def reserved(self) -> dict[str, int]:
        return {name: blocks for name, blocks in self.admission.reserved.items() if blocks}


@dataclass(eq=False)
class Call:
    """A call whose sequences take `blocks` each, from its arrival until it is told to end."""

    room: Room
    blocks: int
    n: int = 1
    role: str = "a"
    last: str | None = None
    bounded: bool = True
    on_entry: Callable[[], None] = lambda: None
    readers: list[Reader] = field(default_factory=list)
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    error: RouterError | None = None

    def __post_init__(self) -> None:
        self.ask = ask(self.role, self.n, max_tokens=BLOCK if self.bounded else None)
        self.prompt = Prompt(ids=[0] * (BLOCK * (self.blocks - 1)), context_tokens=0)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        session = Session("s", Ledger(), Turns())
        if self.last is not None:
            session.decode_workers[self.role] = self.last
        try:
            async with self.room.admission.admitted(self.ask, session, [self.prompt]) as readers:
                self.readers = readers
                self.on_entry()
                await self.ending.wait()
        except RouterError as error:
            self.error = error

    @property
    def at(self) -> list[str]:
        return [reader.worker.id for reader in self.readers]

    async def end(self) -> None:
        self.ending.set()
        await self.task


def ask(role: str, n: int = 1, max_tokens: int | None = BLOCK) -> Ask:
    body = {"model": role, "n": n, "messages": []}
    body |= {} if max_tokens is None else {"max_tokens": max_tokens}
    return parse("chat", to_json(body), {}, roles=["a", "b"], base_name="base")


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_call_reserves_its_prompt_and_answer_and_gives_them_back() -> None:
    room = Room()
    call = room.call(3)
    await settle()
    assert room.reserved() == {"a0": 3}
    assert room.placement.decoding == {"a0": 1}
    assert b'prefillshare_decode_reserved_blocks{worker="a0"} 3.0' in room.metrics.render()
    await call.end()
    assert room.reserved() == {}
    assert room.placement.decoding.total() == 0
    assert b'prefillshare_decode_reserved_blocks{worker="a0"} 0.0' in room.metrics.render()


async def test_blocks_are_rounded_up() -> None:
    room = Room()
    for tokens, blocks in [(1, 1), (BLOCK - 1, 1), (BLOCK, 2), (BLOCK + 1, 2)]:
        prompt = Prompt(ids=[0] * tokens, context_tokens=0)
        async with room.admission.admitted(ask("a", max_tokens=1), None, [prompt]) as [reader]:
            assert reader.place.blocks == blocks


async def test_an_answer_of_open_length_gets_some_room_and_never_more_than_a_worker() -> None:
    room = Room(reserve_tokens=BLOCK * 4)
    for prompt_blocks, reserved in [(2, 6), (9, CAPACITY)]:
        call = room.call(prompt_blocks + 1, bounded=False)
        await settle()
        assert call.readers[0].place.blocks == reserved
        await call.end()


async def test_the_last_worker_is_kept_among_equals_and_the_fewest_answers_decide() -> None:
    room = Room()
    first = room.call(1, last="a1")
    await settle()
    second = room.call(1, last="a1")
    await settle()
    assert (first.at, second.at) == (["a1"], ["a0"])
    await first.end()
    await second.end()


async def test_choices_spread_over_the_replicas() -> None:
    room = Room()
    call = room.call(2, n=4)
    await settle()
    assert Counter(call.at) == {"a0": 2, "a1": 2}
    assert [reader.index for reader in call.readers] == [0, 1, 2, 3]
    await call.end()


async def test_a_call_waits_until_all_of_it_fits() -> None:
    room = Room(worker("a0", "a"))
    running = room.call(5)
    await settle()
    waiting = room.call(3, n=2)
    await settle()
    assert waiting.readers == []
    assert room.reserved() == {"a0": 5}
    assert room.admission.queued == 1
    assert b'prefillshare_queued_calls{role="a"} 1.0' in room.metrics.render()
    await running.end()
    await settle()
    assert waiting.at == ["a0", "a0"]
    assert room.admission.queued == 0
    await waiting.end()
    assert b"prefillshare_queue_seconds_count 2.0" in room.metrics.render()


async def test_a_small_call_does_not_pass_a_big_one() -> None:
    room = Room(worker("a0", "a"))
    running = room.call(6)
    await settle()
    big, small = room.call(8), room.call(1)
    await settle()
    assert (big.readers, small.readers) == ([], [])
    await running.end()
    await settle()
    assert (big.at, small.at) == (["a0"], ["a0"])
    await big.end()
    await small.end()


async def test_another_role_is_not_held_up() -> None:
    room = Room(worker("a0", "a"), worker("b0", "b"))
    calls = [room.call(10), room.call(10), room.call(10, role="b")]
    await settle()
    assert [call.at for call in calls] == [["a0"], [], ["b0"]]
    for call in calls:
        await call.end()


async def test_a_call_too_big_for_a_worker_in_all_its_parts_gets_a_whole_one() -> None:
    room = Room(worker("a0", "a"))
    running = room.call(1)
    await settle()
    call = room.call(4, n=8)
    await settle()
    assert call.readers == []
    await running.end()
    await settle()
    assert room.reserved() == {"a0": CAPACITY}
    assert [reader.place.blocks for reader in call.readers] == [4, 4, 2, 0, 0, 0, 0, 0]
    await call.end()
    assert room.reserved() == {}


@pytest.mark.parametrize("n", [1, 3])
async def test_a_sequence_that_can_never_fit_is_a_400_with_both_numbers(n: int) -> None:
    prompt = Prompt(ids=[0] * BLOCK * 4, context_tokens=0)
    too_long = ask("a", n, max_tokens=BLOCK * 6 + 1)
    with pytest.raises(RouterError) as raised:
        async with Room().admission.admitted(too_long, None, [prompt]):
            pass
    assert (raised.value.status, raised.value.param) == (400, "max_tokens")
    assert "takes 11 KV blocks" in raised.value.message
    assert "has 10;" in raised.value.message


async def test_a_prompt_that_can_never_fit_is_blamed_itself() -> None:
    call = Room().call(CAPACITY + 2, bounded=False)
    await call.task
    assert call.error is not None
    assert (call.error.status, call.error.param) == (400, "messages")


async def test_a_big_sequence_goes_to_the_replica_that_is_big_enough() -> None:
    room = Room(worker("a0", "a", 5), worker("a1", "a", 20))
    call = room.call(15)
    await settle()
    assert call.at == ["a1"]
    await call.end()


async def test_workers_of_unknown_size_have_no_limit() -> None:
    room = Room(worker("a0", "a", 0))
    calls = [room.call(50) for _ in range(5)]
    await settle()
    assert all(call.at == ["a0"] for call in calls)
    assert room.reserved() == {"a0": 250}
    for call in calls:
        await call.end()


async def test_full_workers_are_a_504_with_retry_after() -> None:
    room = Room(worker("a0", "a"), queue_s=0.05)
    running = room.call(10)
    await settle()
    late = room.call(1)
    await late.task
    assert late.error is not None
    assert (late.error.status, late.error.code) == (504, "queue_timeout")
    assert "'a'" in late.error.message
    assert "timeouts.queue_s" in late.error.message
    assert int(late.error.headers["Retry-After"]) > 0
    assert room.admission.queued == 0
    await running.end()


async def test_absent_workers_are_a_503_that_says_why_each_is_away() -> None:
    room = Room(queue_s=0.05)
    room.health.drain("a0")
    room.health.failed(
        room.placement.decode["a"][1], WorkerUnreachable("a1", "decode", "gone", sent=False)
    )
    late = room.call(1)
    await late.task
    assert isinstance(late.error, NoWorker)
    assert (late.error.status, late.error.code) == (503, "no_worker")
    assert "role 'a'" in late.error.message
    assert "(a0: draining; a1: could not be reached: gone)" in late.error.message
    assert int(late.error.headers["Retry-After"]) > 0


async def test_a_call_starts_when_a_worker_comes_back() -> None:
    room = Room(worker("a0", "a"))
    room.health.drain("a0")
    call = room.call(1)
    await settle()
    assert call.readers == []
    room.health.undrain("a0")
    await settle()
    assert call.at == ["a0"]
    await call.end()


async def test_a_call_that_only_an_absent_worker_could_hold_is_passed_until_it_is_back() -> None:
    room = Room(worker("a0", "a", 20), worker("a1", "a", 5))
    room.health.drain("a0")
    big, small = room.call(10), room.call(2)
    await settle()
    assert (big.readers, small.at) == ([], ["a1"])
    room.health.undrain("a0")
    await settle()
    assert big.at == ["a0"]
    await big.end()
    await small.end()


async def test_a_worker_that_comes_back_smaller_refuses_who_no_longer_fits() -> None:
    room = Room(worker("a0", "a"))
    room.health.drain("a0")
    call = room.call(8)
    await settle()
    room.health._note(room.placement.decode["a"][0], {"num_blocks": 5})
    await call.task
    assert call.error is not None
    assert call.error.status == 400


async def test_a_client_that_leaves_the_line_lets_the_next_one_pass() -> None:
    room = Room(worker("a0", "a"))
    running = room.call(6)
    await settle()
    big, small = room.call(8), room.call(1)
    await settle()
    big.task.cancel()
    await settle()
    assert small.at == ["a0"]
    assert room.admission.queued == 0
    await running.end()
    await small.end()
    assert room.reserved() == {}


async def test_a_client_that_leaves_in_the_moment_of_its_grant_leaves_no_trace() -> None:
    room = Room(worker("a0", "a"))
    running = room.call(10)
    await settle()
    waiting, next_one = room.call(10), room.call(10)
    await settle()
    running.ending.set()
    while room.admission.queued == 2:
        await asyncio.sleep(0)
    waiting.task.cancel()  # Granted already, and not yet running again.
    await settle()
    assert next_one.at == ["a0"]
    await next_one.end()
    assert (room.reserved(), room.admission.queued) == ({}, 0)


async def moved(room: Room, call: Call, generated: int = 0, avoid: str | None = None) -> None:
    await room.admission.move(call.readers[0], call.ask, generated=generated, avoid=avoid)


async def test_a_move_takes_another_place_and_gives_the_first_one_up() -> None:
    room = Room()
    call = room.call(3)
    await settle()
    await moved(room, call, avoid="a0")
    assert call.at == ["a1"]
    assert room.reserved() == {"a1": 3}
    assert +room.placement.decoding == {"a1": 1}
    await call.end()
    assert room.reserved() == {}


async def test_a_move_returns_to_where_it_was_only_if_no_other_replica_is_available() -> None:
    room = Room()
    call = room.call(3)
    await settle()
    await moved(room, call)
    assert call.at == ["a0"]
    room.health.drain("a1")
    await moved(room, call, avoid="a0")
    assert call.at == ["a0"]
    await call.end()


async def test_a_move_stays_where_no_other_replica_is_big_enough() -> None:
    room = Room(worker("a0", "a", 20), worker("a1", "a", 5))
    call = room.call(10)
    await settle()
    await moved(room, call, avoid="a0")
    assert call.at == ["a0"]
    await call.end()


async def test_a_move_waits_for_another_replica_that_is_only_full() -> None:
    room = Room()
    call = room.call(3, last="a0")
    other = room.call(10, last="a1")
    await settle()
    moving = asyncio.create_task(moved(room, call, avoid="a0"))
    await settle()
    assert not moving.done()
    assert room.reserved() == {"a1": 10}
    await other.end()
    await moving
    assert call.at == ["a1"]
    await call.end()


async def test_a_moved_answer_of_open_length_has_room_for_what_it_generated_and_more() -> None:
    room = Room(reserve_tokens=BLOCK * 2)
    call = room.call(2, bounded=False)
    await settle()
    assert room.reserved() == {"a0": 3}
    await moved(room, call, generated=BLOCK * 3)
    assert room.reserved() == {"a0": 6}
    await call.end()


async def test_a_move_stands_in_line() -> None:
    room = Room(worker("a0", "a"))
    call = room.call(6)
    await settle()
    big = room.call(10)
    await settle()
    moving = asyncio.create_task(moved(room, call))
    await settle()
    assert (big.at, moving.done()) == (["a0"], False)
    await big.end()
    await moving
    await call.end()
    assert room.reserved() == {}


async def test_a_failed_move_leaves_the_reader_without_a_place() -> None:
    room = Room(worker("a0", "a"), queue_s=0.05)
    call = room.call(6)
    await settle()
    room.health.drain("a0")
    with pytest.raises(NoWorker):
        await moved(room, call)
    assert room.reserved() == {}
    await call.end()
    assert room.placement.decoding.total() == 0


async def test_a_finished_answer_can_give_its_place_back_before_its_call_ends() -> None:
    room = Room()
    call = room.call(4, n=2)
    await settle()
    room.admission.leave(call.readers[0])
    room.admission.leave(call.readers[0])
    assert room.reserved() == {"a1": 4}
    await call.end()
    assert room.reserved() == {}


async def test_has_other_looks_for_an_available_replica() -> None:
    room = Room()
    assert room.admission.has_other("a", "a0")
    assert not room.admission.has_other("b", "b0")
    room.health.drain("a1")
    assert not room.admission.has_other("a", "a0")


async def test_calls_wait_in_the_router_while_decode_is_full(start: Start) -> None:
    async with start(decode_blocks=31) as bench:
        worker = bench.decode["alpha-0"]
        worker.pace = asyncio.Semaphore(0)
        calls = [asyncio.create_task(bench.stream(max_tokens=20 * 16)) for _ in range(3)]
        async with asyncio.timeout(5):
            while bench.router.admission.queued != 2:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert len(worker.requests) == 1
        assert len(bench.prefill[0].requests) == 1
        for _ in range(100):
            worker.pace.release()
        assert all(events[-1] == "[DONE]" for events in await asyncio.gather(*calls))
        assert not await bench.settled()


Step = tuple[str, int, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "leave", "cancel", "move", "down", "up"]),
        st.integers(0, 7),
        st.integers(1, CAPACITY),
        st.integers(1, 4),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_no_sequence_of_events_exceeds_a_worker_loses_a_block_or_breaks_the_line(
    todo: list[Step],
) -> None:
    asyncio.run(_play(todo))


async def _play(todo: list[Step]) -> None:
    room = Room()
    arrived: dict[str, list[object]] = {"a": [], "b": []}
    entered: dict[str, list[object]] = {"a": [], "b": []}
    calls: list[Call] = []
    moves: list[tuple[Call, Reader, asyncio.Task[None]]] = []

    def tracked(role: str, who: object) -> Callable[[], None]:
        arrived[role].append(who)
        return lambda: entered[role].append(who)

    async def move(call: Call, reader: Reader, avoid: str | None) -> None:
        who = object()
        entry = tracked(call.role, who)
        try:
            await room.admission.move(reader, call.ask, generated=0, avoid=avoid)
            entry()
        except asyncio.CancelledError:
            arrived[call.role].remove(who)
            raise

    def moving(call: Call) -> list[Reader]:
        return [reader for each, reader, task in moves if each is call and not task.done()]

    def idle(call: Call) -> bool:
        return bool(call.readers) and not moving(call)

    for what, which, blocks, n in todo:
        if what == "admit":
            role = "b" if which == 7 else "a"
            call = Call(room, blocks, n=n, role=role, last=f"a{which % 2}")
            call.on_entry = tracked(role, call)
            calls.append(call)
        elif what in ("down", "up"):
            worker_id = ("a0", "a1", "b0")[which % 3]
            (room.health.drain if what == "down" else room.health.undrain)(worker_id)
        elif calls:
            call = calls[which % len(calls)]
            if what == "leave" and idle(call):
                await call.end()
                calls.remove(call)
            elif what == "cancel":
                call.task.cancel()
                for each, _, task in moves:
                    if each is call:
                        task.cancel()
                if not call.readers:
                    arrived[call.role].remove(call)
                calls.remove(call)
            elif what == "move" and idle(call):
                reader = call.readers[n % len(call.readers)]
                avoid = reader.worker.id if blocks % 2 else None
                moves.append((call, reader, asyncio.create_task(move(call, reader, avoid))))
        await settle()
        _check(room, arrived, entered)
    for worker_id in ("a0", "a1", "b0"):
        room.health.undrain(worker_id)
    while calls:
        # Answers end whether or not others of their call wait for room.
        for call in calls:
            for reader in set(call.readers) - set(moving(call)):
                room.admission.leave(reader)
        await settle()
        [call, *_] = [each for each in calls if idle(each)]
        await call.end()
        calls.remove(call)
        await settle()
        _check(room, arrived, entered)
    assert [*map(len, entered.values())] == [*map(len, arrived.values())]
    assert room.reserved() == {}
    assert room.admission.queued == 0
    assert room.placement.decoding.total() == 0


def _check(room: Room, arrived: dict[str, list[object]], entered: dict[str, list[object]]) -> None:
    admission = room.admission
    held: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for place in admission._held:
        held[place.worker.id] += place.blocks
        answers[place.worker.id] += 1
    assert +held == +admission.reserved
    assert +answers == +room.placement.decoding
    assert all(0 <= blocks <= CAPACITY for blocks in admission.reserved.values())
    for role, line in admission._lines.items():
        # Within one step the event loop may wake them in another order than they were let in.
        assert set(entered[role]) == set(arrived[role][: len(entered[role])])
        assert len(line) == len(arrived[role]) - len(entered[role])
        assert not line or admission._found(line[0]) is None
