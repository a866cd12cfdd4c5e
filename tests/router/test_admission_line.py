"""Whatever happens in whatever order: no worker is overfull, nothing is lost, the line holds."""

import asyncio
from collections import Counter
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from prefillshare_server.router.handoff import Reader
from tests.router.room import CAPACITY, Call, Room, settle

SLOTS = 2
ADAPTERS = (None, "x", "y", "z")
"""None stands for the workers' own weights."""

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


@settings(max_examples=150)
@given(steps)
def test_no_sequence_of_events_exceeds_a_worker_loses_a_block_or_breaks_the_line(
    todo: list[Step],
) -> None:
    asyncio.run(_play(todo))


async def _play(todo: list[Step]) -> None:
    room = Room(max_loras=SLOTS)
    arrived: dict[str, list[object]] = {"a": [], "b": []}
    entered: dict[str, list[object]] = {"a": [], "b": []}
    calls: list[Call] = []
    moves: list[tuple[Call, Reader, asyncio.Task[None]]] = []

    def tracked(role: str, who: object) -> Callable[[], None]:
        arrived[role].append(who)
        return lambda: entered[role].append(who)

    async def move(call: Call, reader: Reader, avoid: bool) -> None:
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
            adapter = ADAPTERS[(which + blocks) % len(ADAPTERS)]
            call = Call(room, blocks, n=n, role=role, adapter=adapter, last=f"a{which % 2}")
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
                avoid = bool(blocks % 2)
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
    assert room.admission.decoding.total() == 0
    assert sum(each.total() for each in room.admission._adapters.values()) == 0


def _check(room: Room, arrived: dict[str, list[object]], entered: dict[str, list[object]]) -> None:
    admission = room.admission
    held: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for place in admission._held:
        held[place.worker.id] += place.blocks
        answers[place.worker.id] += 1
    adapters = {(p.worker.id, p.model) for p in admission._held if p.model != p.worker.model}
    assert max(Counter(worker for worker, _ in adapters).values(), default=0) <= SLOTS
    assert +held == +admission.reserved
    assert +answers == +room.admission.decoding
    assert all(0 <= blocks <= CAPACITY for blocks in admission.reserved.values())
    for role, line in admission._lines.items():
        # Within one step the event loop may wake them in another order than they were let in.
        assert set(entered[role]) == set(arrived[role][: len(entered[role])])
        assert len(line) == len(arrived[role]) - len(entered[role])
        assert not line or admission._found(line[0]) is None
