"""MOCK of one request inside a decode engine: room, pull, the last prompt token, generation."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from prefillshare_server.vllm_plugin.account import EVENT_MARK, Account, Event, Totals
from prefillshare_server.vllm_plugin.handoff import ReadableParams
from tests.mocks.mock_pair_faults import Fault
from tests.mocks.mock_pair_language import Asked, Tag, Writer, extended
from tests.mocks.mock_pair_ledger import BLOCK
from tests.mocks.mock_pair_server import Engine

if TYPE_CHECKING:
    from tests.mocks.mock_pair_decode import PairDecode
    from tests.mocks.mock_pair_prefill import PairPrefill

_SILENT_EVENTS = frozenset({"kv_load_failed", "lease_expired"})
"""After these the real plug-in does not tell the prefill worker that the lease is over."""


@dataclass(slots=True)
class Output:
    """One step's news of a request."""

    ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | None = None


class DecodeEngine(Engine):
    """Adds the running requests, in order of their start, and the accounts of ended ones."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.requests: list[DecodeRequest] = []
        self.accounts: dict[str, dict[str, Any]] = {}
        self.taken: set[str] = set()
        self.begun: set[str] = set()
        self.given_up: set[str] = set()
        """X-Request-Ids of calls it got, and of calls it must not take any more."""
        self.totals = Totals()


class Source:
    """The wire to the prefill worker that holds the handoff."""

    def __init__(self, worker: "PairDecode", params: ReadableParams) -> None:
        self._worker = worker
        self._params = params
        self._key = (params.remote_engine_id, params.remote_request_id)

    @property
    def _remote(self) -> "PairPrefill | None":
        remote = self._worker.cluster.prefill.get(self._params.remote_port)
        return remote if remote is not None and remote.up else None

    def attend(self) -> None:
        """Begin the heartbeats that keep the lease alive while the request waits."""
        if self._remote is not None and self._worker.guards.heartbeats:
            self._remote.attend(*self._key, self._worker.id)

    def neglect(self) -> None:
        """End the heartbeats, as the death of this worker does."""
        if self._remote is not None:
            self._remote.attend(*self._key, None)

    def pull(self, count: int) -> list[Tag] | None:
        """KV of the first `count` positions; None if the transfer fails."""
        remote = self._remote
        if remote is None:
            return None
        if self._worker.guards.engine_id and remote.engine.id != self._params.remote_engine_id:
            return None
        blocks = self._params.remote_block_ids[0]
        return remote.pull(*self._key, blocks, count, self._worker.id)

    def done(self) -> None:
        """Tell the prefill worker that the lease is over."""
        if self._remote is not None:
            self._remote.pulled(*self._key)


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request that was accepted."""

    worker: "PairDecode"
    engine: DecodeEngine
    router_id: str
    call: str
    ids: list[int]
    asked: Asked
    source: Source
    generated: list[int]
    fault: Fault | None
    account: Account = field(default_factory=Account)
    blocks: list[int] = field(default_factory=list)
    victim: bool = False
    """Another request needs its blocks."""
    sent: int = 0
    """Tokens so far, replayed ones included."""

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """Every step up to the last one, which has a finish reason."""
        engine = self.engine
        self.source.attend()
        try:
            event = await self._admitted() or await self._loaded()
            for token in self.generated:
                yield Output([token])
                self.sent += 1
            if event is not None:
                yield self._marked(event, [])
                return
            async for output in self._written():
                yield output
                self.sent += len(output.ids)
        finally:
            if self in engine.requests:
                engine.requests.remove(self)
            if engine.dead:
                self.source.neglect()
            else:
                self._end()

    @property
    def _base_len(self) -> int:
        """Prompt positions whose KV is the base's: all but the last."""
        return len(self.ids) - 1

    async def _admitted(self) -> Event | None:
        """Wait for room; the event to end with if there is none in time."""
        engine, loop = self.engine, asyncio.get_running_loop()
        deadline = loop.time() + self.worker.cluster.handoff_s
        engine.waiting += 1
        try:
            await asyncio.sleep(self.worker.queue_s)
            while True:
                most = self._base_len // BLOCK
                if not self.worker.guards.cache_base_only:
                    most = len(self.ids) // BLOCK
                cached = engine.pool.find(self.ids, most)
                tokens = len(self.ids) + len(self.generated) + 1
                taken = engine.pool.take(cached, _blocks(tokens) - len(cached))
                if taken is not None:
                    break
                if (left := deadline - loop.time()) <= 0:
                    return "handoff_timeout"
                await engine.pool.freed(left)
        finally:
            engine.waiting -= 1
        self.blocks = taken
        engine.requests.append(self)
        self.account.base_tokens_reused = min(len(cached) * BLOCK, self._base_len)
        return None

    async def _loaded(self) -> Event | None:
        """Pull the blocks that are not here; the event to end with if that fails."""
        worker, pool = self.worker, self.engine.pool
        reused = self.account.base_tokens_reused
        await asyncio.sleep(worker.wire_s)
        fault = self.fault
        if fault is not None and fault.kind in ("kv_load_failed", "handoff_timeout"):
            worker.struck(fault, self.call)
            return fault.kind
        if worker.computes_prompts:
            pool.write(self.blocks, extended([], worker.role, self.ids[: self._base_len]), 0)
            return None
        if reused < self._base_len:
            tags = self.source.pull(self._base_len)
            if tags is None:
                worker.cluster.note(f"{worker.id} could not pull for call {self.call}")
                return "kv_load_failed"
            pool.write(self.blocks, tags, reused)
            self.account.base_tokens_received = self._base_len - reused
            self.account.handoff_bytes = (_blocks(self._base_len) - reused // BLOCK) * 1024
        self.source.done()
        whole = self._base_len // BLOCK
        pool.cache(self.ids[: whole * BLOCK], self.blocks[:whole])
        return None

    async def _written(self) -> AsyncGenerator[Output, None]:
        """Run the last prompt token and the answer so far, and go on."""
        worker, random = self.worker, self.worker.cluster.random
        tags = self.engine.pool.read(self.blocks, self._base_len)
        worker.cluster.check_base(f"{worker.id} on call {self.call}", self.ids[:-1], tags)
        tags = extended(tags, worker.role, self.ids[-1:])
        writer = Writer(worker.cluster.words, worker.role, self.asked, tags)
        self.account.prompt_tokens_computed = 1
        self.account.generated_tokens_recomputed = len(self.generated)
        for token in self.generated:
            writer.append(token)
        held: list[int] = []
        while writer.finish_reason is None:
            await asyncio.sleep(worker.pace_s)
            if self._preempted(len(writer.ids)) or not await self._room(writer):
                yield self._marked("preempted", held)
                return
            held.append(writer.next())
            # Under load the tokens of several steps leave in one chunk.
            if writer.finish_reason is None and random.random() >= worker.merging:
                yield Output(held)
                held = []
        if not worker.guards.cache_base_only:
            self.engine.pool.write(self.blocks, writer.tags, self._base_len)
            self.engine.pool.cache([*self.ids, *writer.ids], self.blocks)
        yield Output(held, writer.finish_reason)

    def _preempted(self, count: int) -> bool:
        fault = self.fault
        if fault is None or fault.kind != "preempted" or count < fault.after:
            return self.victim
        self.worker.struck(fault, self.call)
        return True

    async def _room(self, writer: Writer) -> bool:
        """Make sure of a place for the next token; False if this request has to go for others."""
        engine = self.engine
        while (missing := _blocks(len(self.ids) + len(writer.ids) + 1) - len(self.blocks)) > 0:
            if (taken := engine.pool.take([], missing)) is not None:
                self.blocks += taken
                continue
            # The youngest goes, as in vLLM.
            youngest = engine.requests[-1]
            if not youngest.victim:
                youngest.victim = True
                self.worker.cluster.preempted[youngest.call] += 1
                self.worker.cluster.note(f"{self.worker.id} preempts call {youngest.call}")
            if self.victim:
                return False
            await engine.pool.freed(self.worker.pace_s + 0.001)
        return not self.victim

    def _marked(self, event: Event, ids: list[int]) -> Output:
        self.account.event = event
        self.engine.totals.events[event] += 1
        return Output(ids, "abort", EVENT_MARK + event)

    def _end(self) -> None:
        """As vLLM does however a request ends: its blocks are free, its account is there."""
        engine, account = self.engine, self.account
        engine.pool.free(self.blocks)
        self.blocks = []
        if account.event in _SILENT_EVENTS:
            self.source.neglect()
        else:
            self.source.done()
        engine.accounts[self.router_id] = asdict(account)
        engine.totals.add(account)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)
