"""Reserves a place on the role's decode workers for every sequence of a call."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from prefillshare_server.router.ask import Ask
from prefillshare_server.router.handoff import Prompt, Reader
from prefillshare_server.router.placement import Placement
from prefillshare_server.router.sessions import Session


@contextmanager
def admitted(
    placement: Placement, ask: Ask, session: Session | None, prompts: Sequence[Prompt]
) -> Iterator[list[Reader]]:
    """One reader per choice and prompt, in the order of the choices in the client's answer.

    They count as running calls of their decode workers until the block ends.
    """
    last = session.decode_workers.get(ask.role) if session else None
    readers: list[Reader] = []
    with ExitStack() as places:
        for prompt in prompts:
            for choice in range(ask.n):
                worker = placement.place_decode(ask.role, last)
                places.enter_context(placement.decode_load(worker))
                readers.append(Reader(len(readers), choice, prompt, worker))
        yield readers
