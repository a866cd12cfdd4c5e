"""One call, several sequences: n choices, or several prompts, each with its own handoff."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from prefillshare_server.router.handoff import Handoff

Answer = dict[str, Any]
"""What a decode worker sent: a chunk of a stream, or a whole answer."""


async def together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once. The first error cancels the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def merged(
    handoffs: Sequence[Handoff], decode: Callable[[Handoff], AsyncGenerator[Answer, None]]
) -> AsyncGenerator[tuple[Handoff, Answer], None]:
    """Decode all handoffs at once and yield their answers as they come.

    The first error ends all of them. Closing the generator closes every decode.
    """
    if len(handoffs) == 1:
        async with aclosing(decode(handoffs[0])) as answers:
            async for answer in answers:
                yield handoffs[0], answer
        return
    # Unbounded: its readers are the tokens of one call, and a full queue could not be closed.
    ready: asyncio.Queue[tuple[Handoff, Answer] | None] = asyncio.Queue()

    async def pump(handoff: Handoff) -> None:
        async with aclosing(decode(handoff)) as answers:
            async for answer in answers:
                ready.put_nowait((handoff, answer))

    async def pump_all() -> None:
        try:
            await together(pump(handoff) for handoff in handoffs)
        finally:
            ready.put_nowait(None)

    pumping = asyncio.create_task(pump_all())
    try:
        while (item := await ready.get()) is not None:
            yield item
        await pumping
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
