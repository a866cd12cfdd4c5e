"""Admission alone, for its tests: workers of a few blocks, and calls that come and go."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_core import to_json

from prefillshare_server.router.admission import Admission
from prefillshare_server.router.ask import Ask, parse
from prefillshare_server.router.errors import RouterError
from prefillshare_server.router.handoff import Prompt, Reader
from prefillshare_server.router.health import Health
from prefillshare_server.router.ledger import Ledger
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.placement import Placement
from prefillshare_server.router.sessions import Session
from prefillshare_server.router.topology import Decoder, WorkerEndpoint
from prefillshare_server.router.turns import Turns
from prefillshare_server.router.workers import Workers

BLOCK = 16
CAPACITY = 10
"""Blocks of each worker that requests can have."""


def worker(worker_id: str, role: str, capacity: int = CAPACITY) -> WorkerEndpoint:
    blocks = capacity + 1 if capacity else 0
    return WorkerEndpoint(worker_id, "decode", role, "http://w", role, BLOCK, 1, blocks)


class Room:
    """Admission to workers a0, a1 (role a) and b0 (role b), or to others."""

    def __init__(
        self,
        *workers: WorkerEndpoint,
        queue_s: float = 600.0,
        reserve_tokens: int = 64,
        max_loras: int | None = None,
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
            max_loras=max_loras,
        )

    def call(self, blocks: int, **options: Any) -> "Call":
        return Call(self, blocks, **options)

    def start(self, worker_id: str, engine: str) -> None:
        """The worker says that this start of it is another one than before."""
        self.health._facts[worker_id] = replace(self.health.facts[worker_id], engine_id=engine)
        self.health._tell()

    def reserved(self) -> dict[str, int]:
        return {name: blocks for name, blocks in self.admission.reserved.items() if blocks}


@dataclass(eq=False)
class Call:
    """A call whose sequences take `blocks` each, from its arrival until it is told to end."""

    room: Room
    blocks: int
    n: int = 1
    role: str = "a"
    adapter: str | None = None
    """Speaks for the role instead of the workers' own weights."""
    last: str | None = None
    bounded: bool = True
    on_entry: Callable[[], None] = lambda: None
    readers: list[Reader] = field(default_factory=list)
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    error: RouterError | None = None

    def __post_init__(self) -> None:
        tokens = BLOCK if self.bounded else None
        self.ask = ask(self.role, self.n, max_tokens=tokens, model=self.adapter or self.role)
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


def ask(role: str, n: int = 1, max_tokens: int | None = BLOCK, model: str | None = None) -> Ask:
    body = {"model": role, "n": n, "messages": []}
    body |= {} if max_tokens is None else {"max_tokens": max_tokens}
    return parse(
        "chat",
        to_json(body),
        {},
        roles={name: Decoder(name, model or name) for name in ("a", "b")},
        base_name="base",
    )


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def moved(room: Room, call: Call, generated: int = 0, avoid: bool = False) -> None:
    await room.admission.move(call.readers[0], call.ask, generated=generated, avoid=avoid)
