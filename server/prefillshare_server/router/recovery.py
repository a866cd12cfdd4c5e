"""Recovery: an answer that broke off goes on, on this or another decode worker, without a seam.

The base prefills the prompt again (mostly from its prefix cache) and the decoder gets, beside the
handoff, what it had generated: it runs these tokens again with its own weights and continues.
Prefilling prompt + answer on the base instead would change the answer: the base's KV of the answer
is not the decoder's.
"""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing

from prefillshare_server.router.admission import Admission
from prefillshare_server.router.ask import Ask
from prefillshare_server.router.colocated import Colocated
from prefillshare_server.router.decode import Decode, Interrupted
from prefillshare_server.router.fanout import Answer
from prefillshare_server.router.handoff import Handoff
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.prefill import Prefill
from prefillshare_server.router.sessions import Session
from prefillshare_server.router.splice import StreamSplice, WholeSplice

FRUITLESS_ATTEMPTS = 3
"""Attempts in a row that may end without a new token; the next failure is the client's."""

_PAUSE_S = 0.05


class Recovery:
    """Runs one sequence to its end over as many decode workers as it takes."""

    def __init__(
        self, admission: Admission, prefill: Prefill | Colocated, decode: Decode, metrics: Metrics
    ) -> None:
        self._admission = admission
        self._prefill = prefill
        self._decode = decode
        self._metrics = metrics

    async def answers(
        self, ask: Ask, session: Session | None, handoff: Handoff
    ) -> AsyncGenerator[Answer, None]:
        """Yield the sequence's answers as one attempt would have given them.

        Further handoffs are appended to `handoff.later`; the reader's place is given back at the
        end. Closing the generator aborts what runs at the workers. Raises RouterError if the
        sequence cannot be resumed, or not with success.
        """
        splice = StreamSplice() if ask.stream else WholeSplice()
        current, fruitless = handoff, 0
        try:
            while True:
                known = len(splice.ids)
                try:
                    async with aclosing(self._decode.answers(ask, current, splice.ids)) as answers:
                        async for answer in answers:
                            if (new := splice.take(answer)) is not None:
                                yield new
                    return
                except Interrupted as interrupted:
                    broken = interrupted
                self._prefill.give_back(current)
                splice.restart(broken.partial)
                fruitless = 0 if len(splice.ids) > known else fruitless + 1
                if fruitless > FRUITLESS_ATTEMPTS or not self._can_go_on(ask, current, broken):
                    raise broken.error
                self._metrics.resumed(broken.error.code or "")
                if fruitless:
                    await asyncio.sleep(random.uniform(0, _PAUSE_S * 2**fruitless))
                current = await self._again(ask, session, handoff, broken, len(splice.ids))
        finally:
            # Before the call ends: its other sequences, and those of others, may wait for room.
            self._admission.leave(handoff.reader)

    def _can_go_on(self, ask: Ask, handoff: Handoff, broken: Interrupted) -> bool:
        """A worker that is silent may only be slow: asking it again would slow it down further."""
        return not broken.silent or self._admission.has_other(
            ask.decoder.pool, handoff.reader.worker.id
        )

    async def _again(
        self, ask: Ask, session: Session | None, first: Handoff, broken: Interrupted, generated: int
    ) -> Handoff:
        reader = first.reader
        await self._admission.move(reader, ask, generated=generated, avoid=broken.lost)
        unreadable = {each.placed.worker.id for each in (first, *first.later) if each.unreadable}
        again = await self._prefill.again(ask, session, reader, avoid=unreadable)
        first.later.append(again)
        return again
