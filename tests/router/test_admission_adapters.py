"""Who gets a place where adapters share workers, and where engines prefill themselves."""

import asyncio
from collections import Counter
from dataclasses import replace

from prefillshare_server.router.colocated import Colocated
from prefillshare_server.router.handoff import Prompt
from prefillshare_server.router.identity import Identity
from prefillshare_server.router.sessions import Sessions
from prefillshare_server.router.workers import Workers
from tests.router.room import BLOCK, Room, ask, moved, settle, worker


async def test_an_adapter_waits_for_a_slot_and_later_calls_of_others_wait_behind_it() -> None:
    """Where the running one's calls passed it, it might wait for ever."""
    room = Room(worker("a0", "a"), max_loras=1)
    calls = [room.call(1, adapter=name) for name in ("one", "one", "two", "one", "two")]
    await settle()
    assert [len(call.at) for call in calls] == [1, 1, 0, 0, 0]
    await calls[0].end()
    assert [len(call.at) for call in calls[2:]] == [0, 0, 0]
    await calls[1].end()
    await settle()
    assert [len(call.at) for call in calls[2:]] == [1, 0, 0]
    await calls[2].end()
    await settle()
    assert [len(call.at) for call in calls[3:]] == [1, 0]
    await calls[3].end()
    await settle()
    assert calls[4].at == ["a0"]
    await calls[4].end()
    assert room.reserved() == {}


async def test_the_workers_own_weights_need_no_slot() -> None:
    room = Room(worker("a0", "a"), max_loras=1)
    calls = [room.call(1, adapter=name) for name in ("one", None, "one")]
    await settle()
    assert [call.at for call in calls] == [["a0"]] * 3
    for call in calls:
        await call.end()


async def test_an_adapter_goes_where_it_has_a_slot_before_where_the_session_is() -> None:
    room = Room(worker("a0", "a"), worker("a1", "a"), max_loras=1)
    calls = [room.call(1, adapter=name, last="a0") for name in ("one", "two", "one")]
    await settle()
    assert [call.at for call in calls] == [["a0"], ["a1"], ["a0"]]
    for call in calls:
        await call.end()


async def test_a_lost_worker_that_was_started_again_is_as_good_as_any() -> None:
    """An answer that may not go back there would keep all calls behind it waiting as well."""
    room = Room(worker("a0", "a"), worker("a1", "a"), max_loras=1)
    for name in ("a0", "a1"):
        room.start(name, "first")
    lost, other = room.call(1, adapter="one"), room.call(1, adapter="two")
    await settle()
    moving = asyncio.create_task(moved(room, lost, avoid=True))
    await settle()
    assert not moving.done()
    room.start("a0", "second")
    await moving
    assert lost.at == ["a0"]
    for call in (lost, other):
        await call.end()


async def test_idle_replicas_take_new_sessions_in_turn() -> None:
    room = Room()
    seen: Counter[str] = Counter()
    for _ in range(6):
        call = room.call(1)
        await settle()
        seen.update(call.at)
        await call.end()
    assert seen == {"a0": 3, "a1": 3}


def engines(count: int) -> Room:
    """Engines that prefill and decode, for role a."""
    each = [replace(worker(f"e{n}", "a"), phase="colocated") for n in range(count)]
    return Room(*each)


async def test_one_engine_takes_all_choices_of_a_call() -> None:
    """So that its prompt is prefilled once."""
    room = engines(2)
    calls = [room.call(2, n=4), room.call(2, n=2)]
    await settle()
    assert [set(call.at) for call in calls] == [{"e0"}, {"e1"}]
    for call in calls:
        await call.end()


async def test_a_call_that_fills_one_engine_takes_others_as_well() -> None:
    room = engines(2)
    call = room.call(6, n=4)
    await settle()
    assert Counter(call.at) == {"e0": 2, "e1": 2}
    await call.end()


async def test_a_replica_that_was_away_takes_its_turn_and_no_more() -> None:
    room = Room()
    room.health.drain("a1")
    seen: list[str] = []
    for number in range(8):
        if number == 4:
            room.health.undrain("a1")
        call = room.call(1)
        await settle()
        seen += call.at
        await call.end()
    assert seen == ["a0", "a0", "a0", "a0", "a1", "a0", "a1", "a0"]


async def test_of_two_engines_for_one_call_the_first_is_the_sessions() -> None:
    room = engines(2)
    others = [room.call(2), room.call(1)]
    await settle()
    sessions = Sessions(60)
    parts = (Workers(), room.health, room.placement, room.admission, sessions, room.metrics)
    colocated = Colocated(*parts, timeout_s=1)
    prompt = Prompt(ids=[0] * (BLOCK * 5), context_tokens=0)
    with sessions.opened(Identity(session="s", parent=None, final=False)) as session:
        async with (
            room.admission.admitted(ask("a", 2), session, [prompt]) as readers,
            colocated.handoffs(ask("a", 2), session, readers) as handoffs,
        ):
            assert [reader.worker.id for reader in readers] == ["e1", "e0"]
            assert [handoff.placed.affinity for handoff in handoffs] == ["new", "new"]
        async with (
            room.admission.admitted(ask("a"), session, [prompt]) as readers,
            colocated.handoffs(ask("a"), session, readers) as handoffs,
        ):
            assert [reader.worker.id for reader in readers] == ["e1"]
            assert [handoff.placed.affinity for handoff in handoffs] == ["hit"]
    assert b"session_rebinds_total{" not in room.metrics.render()
    for call in others:
        await call.end()
