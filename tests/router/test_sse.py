"""Server-sent events survive any way the bytes are cut."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillshare_server.router import sse

EVENTS = [{"a": "x\n\ny"}, {"b": "é€"}, {"c": [1, 2]}]
STREAM = b": keep-alive\n\n" + b"".join(map(sse.encode, EVENTS)) + sse.DONE


async def cut(data: bytes, *positions: int) -> AsyncIterator[bytes]:
    last = 0
    for position in [*sorted(positions), len(data)]:
        yield data[last:position]
        last = position


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
async def test_events_come_out_whole(positions: list[int]) -> None:
    decoded = sse.decode(cut(STREAM, *positions), first_s=5, next_s=5)
    assert [event async for event in decoded] == EVENTS


async def test_a_stream_that_just_ends_gives_what_it_had() -> None:
    data = sse.encode(EVENTS[0])
    assert [event async for event in sse.decode(cut(data), first_s=5, next_s=5)] == EVENTS[:1]


async def test_silence_ends_in_a_timeout() -> None:
    async def silent() -> AsyncIterator[bytes]:
        yield sse.encode(EVENTS[0])
        await asyncio.sleep(60)

    events = sse.decode(silent(), first_s=5, next_s=0.01)
    assert await anext(events) == EVENTS[0]
    with pytest.raises(TimeoutError):
        await anext(events)
