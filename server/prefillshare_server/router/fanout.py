"""One call, several sequences: n choices, or several prompts, each with its own handoff."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from prefillshare_server.router.handoff import Handoff

Answer = dict[str, Any]
"""What a decode worker sent: a chunk of a stream, or a whole answer."""


_GRACE_S = 0.5


async def together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once. An error ends the others and is raised as itself.

    The others get a moment to end by themselves: a request that one worker refuses is about to be
    refused by all, and cancelled while it is being judged its lease would have no owner.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.done() and not task.cancelled() and task.exception() for task in tasks):
            await asyncio.wait(tasks, timeout=_GRACE_S)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda each: isinstance(each, asyncio.CancelledError)):
        raise error


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
