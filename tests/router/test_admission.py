"""Room on the decode workers: who gets it, who waits, and that all of it is given back."""

import asyncio
from collections import Counter

import pytest

from prefillshare_server.router.errors import NoWorker, RouterError, WorkerUnreachable
from prefillshare_server.router.handoff import Prompt
from tests.router.conftest import Start, until
from tests.router.room import BLOCK, CAPACITY, Room, ask, moved, settle, worker


async def test_a_call_reserves_its_prompt_and_answer_and_gives_them_back() -> None:
    room = Room()
    call = room.call(3)
    await settle()
    assert room.reserved() == {"a0": 3}
    assert room.admission.decoding == {"a0": 1}
    assert b'prefillshare_decode_reserved_blocks{worker="a0"} 3.0' in room.metrics.render()
    await call.end()
    assert room.reserved() == {}
    assert room.admission.decoding.total() == 0
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


async def test_the_worker_that_holds_the_session_is_kept_while_it_has_room() -> None:
    room = Room()
    calls = []
    for blocks in (1, CAPACITY - 1, 1):
        calls.append(room.call(blocks, last="a1"))
        await settle()
    assert [call.at for call in calls] == [["a1"], ["a1"], ["a0"]]
    for call in calls:
        await call.end()


async def test_a_session_without_a_worker_goes_where_the_fewest_blocks_are_reserved() -> None:
    room = Room()
    calls = []
    for blocks in (3, 1, 1, 2):
        calls.append(room.call(blocks))
        await settle()
    assert [call.at for call in calls] == [["a0"], ["a1"], ["a1"], ["a1"]]
    for call in calls:
        await call.end()


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


async def test_a_move_takes_another_place_and_gives_the_first_one_up() -> None:
    room = Room()
    call = room.call(3)
    await settle()
    await moved(room, call, avoid=True)
    assert call.at == ["a1"]
    assert room.reserved() == {"a1": 3}
    assert +room.admission.decoding == {"a1": 1}
    await call.end()
    assert room.reserved() == {}


async def test_a_move_returns_to_where_it_was_only_if_no_other_replica_is_available() -> None:
    room = Room()
    call = room.call(3)
    await settle()
    await moved(room, call)
    assert call.at == ["a0"]
    room.health.drain("a1")
    await moved(room, call, avoid=True)
    assert call.at == ["a0"]
    await call.end()


async def test_a_move_stays_where_no_other_replica_is_big_enough() -> None:
    room = Room(worker("a0", "a", 20), worker("a1", "a", 5))
    call = room.call(10)
    await settle()
    await moved(room, call, avoid=True)
    assert call.at == ["a0"]
    await call.end()


async def test_a_move_waits_for_another_replica_that_is_only_full() -> None:
    room = Room()
    call = room.call(3, last="a0")
    other = room.call(10, last="a1")
    await settle()
    moving = asyncio.create_task(moved(room, call, avoid=True))
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
    assert room.admission.decoding.total() == 0


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
        await until(lambda: bench.router.admission.queued == 2 and worker.requests)
        await asyncio.sleep(0.05)
        assert len(worker.requests) == 1
        assert len(bench.prefill[0].requests) == 1
        for _ in range(100):
            worker.pace.release()
        assert all(events[-1] == "[DONE]" for events in await asyncio.gather(*calls))
        assert not await bench.settled()
