"""Reserves KV blocks on the decode workers of a role for every sequence of a call.

A decode worker out of blocks has to throw an answer away. So a call starts only when the blocks of
its prompts and answers are free by the router's own count, and waits in line for them otherwise.
"""

import asyncio
import itertools
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from prefillshare_server.router.ask import Ask
from prefillshare_server.router.errors import NoWorker, RouterError, never_fits, queue_timeout
from prefillshare_server.router.handoff import Prompt, Reader
from prefillshare_server.router.health import Health
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.placement import Placement, Reserved
from prefillshare_server.router.sessions import Session
from prefillshare_server.router.topology import WorkerEndpoint

_UNLIMITED = sys.maxsize


@dataclass(frozen=True, slots=True)
class _Need:
    """Tokens one sequence needs room for."""

    prompt: int
    answer: int
    least: int
    """Tokens of answer without which the sequence makes no sense on a worker."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call, or a sequence that moves, in line for a place for each of its needs."""

    ask: Ask
    needs: Sequence[_Need]
    holder: Callable[[], str | None]
    """The worker to take as long as it has room, for what is known then: it holds base KV."""
    avoid: Reserved | None
    """Its worker is to be taken only if no other is available, or if it was started again."""
    granted: asyncio.Future[list[Reserved]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def pool(self) -> str:
        return self.ask.decoder.pool


def _holder(session: Session | None, ask: Ask) -> str | None:
    """The worker that holds base KV of the session, for all that is known.

    A colocated engine is what the session is pinned to, from its parent's time on.
    """
    if session is None:
        return None
    return session.decode_workers.get(ask.decoder.pool) or session.prefill_worker


class Admission:
    """First come, first served within a pool: a big call is not passed by small ones.

    Nor is one whose adapter waits for a slot: vLLM would let calls of other adapters pass it for
    ever. Only a call that no available replica could hold is, until the one comes back that could.
    """

    def __init__(
        self,
        placement: Placement,
        health: Health,
        metrics: Metrics,
        *,
        queue_s: float,
        reserve_tokens: int,
        max_model_len: int,
        max_loras: int | None = None,
    ) -> None:
        """`max_loras` is how many adapters may answer at once on a worker that adapters share."""
        self._max_loras = max_loras or _UNLIMITED
        self._adapters: dict[str, Counter[str]] = {}
        """Answers of each adapter, by worker, with room reserved."""
        self._placement = placement
        self._health = health
        self._metrics = metrics
        self._queue_s = queue_s
        self._reserve_tokens = reserve_tokens
        self._max_model_len = max_model_len
        self.reserved: Counter[str] = Counter()
        """KV blocks reserved on each decode worker."""
        self.decoding: Counter[str] = Counter()
        """Answers each decode worker has room reserved for."""
        self._held: set[Reserved] = set()
        self._turns = itertools.count(1)
        self._taken: Counter[str] = Counter()
        """When room was last reserved on each decode worker: the higher, the later."""
        self._lines: dict[str, deque[_Waiting]] = {pool: deque() for pool in placement.decode}
        """By pool."""
        health.listen(self._serve_all)

    @property
    def queued(self) -> int:
        """Calls and moving sequences that wait now."""
        return sum(map(len, self._lines.values()))

    @asynccontextmanager
    async def admitted(
        self, ask: Ask, session: Session | None, prompts: Sequence[Prompt]
    ) -> AsyncIterator[list[Reader]]:
        """One reader per choice and prompt, in the order of the choices in the client's answer.

        Waits until there is room for all of them at once. What they hold when the block ends is
        given back. Raises RouterError: 400 for a sequence that fits no worker, 503 if none is
        available in time, 504 if none has room in time.
        """
        sequences = [(prompt, choice) for prompt in prompts for choice in range(ask.n)]
        needs = [self._need(ask, prompt) for prompt, _ in sequences]
        places = await self._places(_Waiting(ask, needs, partial(_holder, session, ask), None))
        readers = [
            Reader(index, choice, prompt, place)
            for index, ((prompt, choice), place) in enumerate(zip(sequences, places, strict=True))
        ]
        try:
            yield readers
        finally:
            for reader in readers:
                self.leave(reader)

    async def move(self, reader: Reader, ask: Ask, *, generated: int, avoid: bool) -> None:
        """Give up `reader.place` and wait in line for another, of which `generated` tokens are due.

        With `avoid` its worker is taken only if it was started again, or while no other one of the
        role is available. Raises RouterError as `admitted` does; the reader then has no room
        anywhere.
        """
        self.leave(reader)
        need = self._need(ask, reader.prompt, generated)
        place = reader.place
        waiting = _Waiting(ask, [need], lambda: place.worker.id, place if avoid else None)
        [reader.place] = await self._places(waiting)

    def leave(self, reader: Reader) -> None:
        """Give back the reader's place, unless that was done before: its answer is complete."""
        self._give_back(reader.place)

    def has_other(self, pool: str, worker_id: str) -> bool:
        """Whether a worker of `pool` besides this one is available."""
        return any(
            worker.id != worker_id and self._health.available(worker.id)
            for worker in self._placement.decode[pool]
        )

    async def _places(self, waiting: _Waiting) -> list[Reserved]:
        pool = waiting.pool
        self._require_fit(waiting)
        with self._metrics.queued(waiting.ask.role):
            self._lines[pool].append(waiting)
            self._serve(pool)
            try:
                if not waiting.granted.done():
                    # Does not cancel what it waits for, so nothing is granted and lost.
                    await asyncio.wait([waiting.granted], timeout=self._queue_s)
                if waiting.granted.done():
                    return waiting.granted.result()
                raise self._refusal(waiting)
            except BaseException:
                self._step_out(waiting)
                raise

    def _step_out(self, waiting: _Waiting) -> None:
        """Leave no trace of a call that no longer waits."""
        if not waiting.granted.done():
            self._lines[waiting.pool].remove(waiting)
            self._serve(waiting.pool)
        elif waiting.granted.exception() is None:
            for place in waiting.granted.result():
                self._give_back(place)

    def _refusal(self, waiting: _Waiting) -> RouterError:
        role = waiting.ask.role
        workers = self._placement.decode[waiting.pool]
        replicas = [worker for worker in workers if self._could_hold(worker, waiting)]
        why = {worker.id: self._health.why_not(worker.id) for worker in replicas}
        if None in why.values():
            return queue_timeout(role, waiting.pool, self._queue_s)
        reasons = {worker: reason or "" for worker, reason in why.items()}
        what = f"no decode worker of role {role!r} that can hold the call was"
        return NoWorker(what, self._queue_s, reasons)

    def _serve_all(self) -> None:
        for pool in self._lines:
            self._serve(pool)

    def _serve(self, pool: str) -> None:
        """Let in from the head of the line whoever has room."""
        line = self._lines[pool]
        for waiting in list(line):
            try:
                # A worker may have come back with fewer blocks.
                self._require_fit(waiting)
            except RouterError as error:
                line.remove(waiting)
                waiting.granted.set_exception(error)
                continue
            places = self._found(waiting)
            if places is None:
                if any(self._could_hold(worker, waiting) for worker in self._available(pool)):
                    return
                continue
            for place in places:
                self._take(place)
            line.remove(waiting)
            waiting.granted.set_result(places)

    def _available(self, pool: str) -> list[WorkerEndpoint]:
        return [w for w in self._placement.decode[pool] if self._health.available(w.id)]

    def _could_hold(self, worker: WorkerEndpoint, waiting: _Waiting) -> bool:
        """Whether each sequence would fit if the worker were idle."""
        capacity = self._capacity(worker)
        return all(self._blocks(need, worker, least=True) <= capacity for need in waiting.needs)

    def _found(self, waiting: _Waiting) -> list[Reserved] | None:
        """A free place for every need, or None: on the worker that has base KV of the session, or
        else where the fewest KV blocks are reserved, in turn where they are equally many.

        An engine that prefills itself takes all of a call for which it has blocks, so that it
        prefills each prompt once.
        The needs of one call are never taken to exceed a whole worker: an idle one takes any call,
        whose sequences it then runs one after the other.
        """
        available = self._available(waiting.pool)
        avoid = waiting.avoid
        others = [
            w
            for w in available
            if self._could_hold(w, waiting)
            and (avoid is None or w.id != avoid.worker.id or self._engine(w) != avoid.engine)
        ]
        ready = others or available
        asked: Counter[str] = Counter()
        places: list[Reserved] = []
        holder = waiting.holder()
        for need in waiting.needs:
            fitting, exceeded = [], set()
            for worker in ready:
                capacity = self._capacity(worker)
                total = asked[worker.id] + self._blocks(need, worker)
                if (
                    self._has_slot(worker, waiting.ask.decoder.model)
                    and self._blocks(need, worker, least=True) <= capacity
                    and self.reserved[worker.id] + min(total, capacity) <= capacity
                ):
                    fitting.append(worker)
                    if asked[worker.id] and total > capacity:
                        exceeded.add(worker.id)
            if not fitting:
                return None
            worker = min(
                fitting,
                key=lambda w: (
                    w.id != holder or w.id in exceeded,
                    self.reserved[w.id] + asked[w.id],
                    self._taken[w.id],
                ),
            )
            capacity = self._capacity(worker)
            before = min(asked[worker.id], capacity)
            asked[worker.id] += self._blocks(need, worker)
            blocks = min(asked[worker.id], capacity) - before
            model, engine = waiting.ask.decoder.model, self._engine(worker)
            places.append(Reserved(worker, blocks, model, engine))
            if worker.phase == "colocated":
                holder = worker.id
        return places

    def _has_slot(self, worker: WorkerEndpoint, model: str) -> bool:
        """Whether the worker can have the weights of `model` on beside those that answer now."""
        if model == worker.model:
            return True
        answering = +self._adapters.get(worker.id, Counter())
        return model in answering or len(answering) < self._max_loras

    def _take(self, place: Reserved) -> None:
        self._held.add(place)
        if place.model != place.worker.model:
            self._adapters.setdefault(place.worker.id, Counter())[place.model] += 1
        self.decoding[place.worker.id] += 1
        self._taken[place.worker.id] = next(self._turns)
        self._count(place.worker, place.blocks)

    def _give_back(self, place: Reserved) -> None:
        """Once: later calls for the same place do nothing."""
        if place not in self._held:
            return
        self._held.remove(place)
        if place.model != place.worker.model:
            self._adapters[place.worker.id][place.model] -= 1
        self.decoding[place.worker.id] -= 1
        self._count(place.worker, -place.blocks)
        self._serve(place.worker.pool or "")

    def _count(self, worker: WorkerEndpoint, blocks: int) -> None:
        self.reserved[worker.id] += blocks
        self._metrics.reserved(worker.id, self.reserved[worker.id])

    def _need(self, ask: Ask, prompt: Prompt, generated: int = 0) -> _Need:
        room = self._max_model_len - len(prompt.ids)
        if ask.max_tokens is not None:
            return _Need(len(prompt.ids), ask.max_tokens, least=ask.max_tokens)
        likely = min(room, generated + self._reserve_tokens)
        return _Need(len(prompt.ids), likely, least=min(room, generated + 1))

    def _engine(self, worker: WorkerEndpoint) -> str | None:
        return self._health.facts[worker.id].engine_id

    def _capacity(self, worker: WorkerEndpoint) -> int:
        """KV blocks of `worker` that requests can have. vLLM keeps one for itself."""
        facts = self._health.facts[worker.id]
        known = facts.num_blocks and facts.block_size
        return facts.num_blocks - 1 if known else _UNLIMITED

    def _blocks(self, need: _Need, worker: WorkerEndpoint, *, least: bool = False) -> int:
        size = self._health.facts[worker.id].block_size
        tokens = need.prompt + (need.least if least else need.answer)
        return -(-tokens // size) if size else 0

    def _require_fit(self, waiting: _Waiting) -> None:
        """Raise RouterError(400) if a need exceeds every replica, also those away just now."""
        replicas = self._placement.decode[waiting.pool]
        largest = max(
            replicas, key=lambda w: self._capacity(w) * (self._health.facts[w.id].block_size or 1)
        )
        capacity = self._capacity(largest)
        for need in waiting.needs:
            needed = self._blocks(need, largest, least=True)
            if needed <= capacity:
                continue
            ask = waiting.ask
            alone = self._blocks(_Need(need.prompt, 1, 1), largest)
            field = "messages" if ask.kind == "chat" else "prompt"
            raise never_fits(
                ask.role,
                prompt_tokens=need.prompt,
                new_tokens=need.least,
                needed=needed,
                blocks=capacity,
                param=field if alone > capacity else ask.max_tokens_field,
            )
