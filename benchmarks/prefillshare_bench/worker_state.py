"""What the workers of a system hold and have computed, read from the workers themselves."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from prefillshare_server.router.topology import Phase

SETTLE_S = 120.0
"""Within this time after the last call the counters of every worker stand still."""
SAMPLE_S = 1.0
_POLL_S = 0.2
_HTTP_S = 30.0

_QUERIES = "vllm:prefix_cache_queries_total"
_HITS = "vllm:prefix_cache_hits_total"
_PREEMPTIONS = "vllm:num_preemptions_total"
_HANDOFFS = "vllm:nixl_xfer_time_seconds"
_USAGE = "vllm:kv_cache_usage_perc"
_BLOCKS = re.compile(r'^vllm:cache_config_info\{.*\bnum_gpu_blocks="(\d+)"', re.MULTILINE)


@dataclass(frozen=True)
class Worker:
    """One engine of a system."""

    id: str
    phase: Phase
    """`colocated` is an engine that prefills and decodes, as those of stock vLLM do."""
    role: str | None
    """The only one it serves; None if it serves several."""
    url: str
    bytes_per_block: int
    stock: bool = False
    """Whether it is vLLM without the plug-in, which tells less."""


@dataclass(frozen=True)
class WorkerState:
    """What a worker had counted since its start, and what it held, at one moment."""

    id: str
    phase: Phase
    role: str | None
    query_tokens: int
    """Prompt tokens that were looked up in the prefix cache, each request's once."""
    hit_tokens: int
    """Those of them that were there. On a worker that prefills, the rest was computed.

    Stock vLLM counts no prompt a second time that it computes again after a preemption: with
    preemptions its figures are too good.
    """
    preemptions: int
    handoffs: int
    """Transfers of KV blocks to it."""
    handoff_seconds: float
    """What they took, from their post to their completion."""
    blocks: int
    """KV blocks that requests can have: vLLM keeps one more for itself."""
    blocks_in_use: int
    """Those that running calls and open leases hold."""
    cached_blocks: int | None
    """Those in the prefix cache, in use or not; None where the worker does not tell."""
    bytes_per_block: int | None

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens it computed; 0 on a decode worker, which gets them."""
        return 0 if self.phase == "decode" else self.query_tokens - self.hit_tokens


@dataclass(frozen=True)
class Peak:
    """The most that one worker held at any sample."""

    id: str
    blocks_in_use: int
    cached_blocks: int | None


@dataclass(frozen=True)
class Peaks:
    """The most that a system held at any sample; each figure may be of another one."""

    workers: tuple[Peak, ...]
    blocks_in_use: int
    """Over all workers at one time."""
    cached_blocks: int | None
    """Over those that tell; None if none does."""
    kv_bytes: int
    """Of the blocks in use."""
    rss_bytes: int
    """Of all processes; memory that some share counts once for each of them."""
    samples: int


def read(workers: Sequence[Worker]) -> list[WorkerState]:
    """The state of each worker now. Raises httpx.HTTPError when one does not answer."""
    with httpx.Client(timeout=_HTTP_S) as http:
        return [_state(worker, http) for worker in workers]


def settled(workers: Sequence[Worker]) -> list[WorkerState]:
    """The state of each worker once no counter moves any more.

    vLLM counts after it has answered, and leases end after that. Raises TimeoutError when a worker
    is still at work after SETTLE_S.
    """
    deadline = time.monotonic() + SETTLE_S
    before = read(workers)
    while True:
        time.sleep(_POLL_S)
        now = read(workers)
        if now == before:
            return now
        if time.monotonic() > deadline:
            busy = ", ".join(b.id for a, b in zip(before, now, strict=True) if a != b)
            raise TimeoutError(f"{busy}: still at work {SETTLE_S:g} s after the last call")
        before = now


class Sampler:
    """Context manager: reads what the workers hold every `interval_s`, in a thread.

    It asks no more than blocks and memory, for the machine is busy. A worker that does not answer
    is left out of that sample.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        processes: Iterable[psutil.Process],
        interval_s: float = SAMPLE_S,
    ) -> None:
        self._workers, self._processes = workers, tuple(processes)
        self._interval_s = interval_s
        self._over = Event()
        self._thread = Thread(target=self._run, name="bench-sampler", daemon=True)
        self._each: dict[str, tuple[int, int | None]] = {}
        self._in_use = self._bytes = self._rss = self._samples = 0
        self._cached: int | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(len(self._workers) * _HTTP_S)

    def peaks(self) -> Peaks:
        """So far."""
        workers = tuple(Peak(name, *found) for name, found in list(self._each.items()))
        return Peaks(workers, self._in_use, self._cached, self._bytes, self._rss, self._samples)

    def _run(self) -> None:
        # All at once, for a busy worker answers late and the sum is about one moment.
        with httpx.Client(timeout=_HTTP_S) as http, ThreadPoolExecutor(len(self._workers)) as pool:
            over = False
            while not over:
                # Once more at the end: what the caches hold is seen, however short the work was.
                over = self._over.wait(self._interval_s)
                self._take(list(pool.map(partial(_held, http=http), self._workers)))

    def _take(self, sample: Sequence[tuple[int, int | None] | None]) -> None:
        in_use = held = 0
        cached: int | None = None
        for worker, blocks in zip(self._workers, sample, strict=True):
            if blocks is None:
                continue
            used, kept = blocks
            in_use, held = in_use + used, held + used * worker.bytes_per_block
            cached = _sum(cached, kept)
            most_used, most_kept = self._each.get(worker.id, (0, None))
            self._each[worker.id] = (max(most_used, used), _max(most_kept, kept))
        self._in_use, self._bytes = max(self._in_use, in_use), max(self._bytes, held)
        self._cached = _max(self._cached, cached)
        self._rss = max(self._rss, sum(map(_rss, self._processes)))
        self._samples += 1


def _held(worker: Worker, http: httpx.Client) -> tuple[int, int | None] | None:
    """Blocks in use and in the prefix cache; None if the worker does not answer."""
    try:
        return _blocks(worker, http)
    except httpx.HTTPError:
        return None


def _state(worker: Worker, http: httpx.Client) -> WorkerState:
    text = _get(http, f"{worker.url}/metrics").text
    preemptions = round(_metric(text, _PREEMPTIONS))
    if worker.stock:
        total = _total_blocks(text)
        in_use, cached = _in_use(text), None
    else:
        state: dict[str, Any] = _get(http, f"{worker.url}/prefillshare/state").json()
        total = state["num_blocks"] - 1
        in_use, cached = total - state["free_blocks"], state.get("cached_blocks")
        # A decode worker ends the victim, so that vLLM counts none.
        preemptions += state["events"]["preempted"]
    return WorkerState(
        id=worker.id,
        phase=worker.phase,
        role=worker.role,
        query_tokens=round(_metric(text, _QUERIES)),
        hit_tokens=round(_metric(text, _HITS)),
        preemptions=preemptions,
        handoffs=round(_metric(text, f"{_HANDOFFS}_count")),
        handoff_seconds=_metric(text, f"{_HANDOFFS}_sum"),
        blocks=total,
        blocks_in_use=in_use,
        cached_blocks=cached,
        bytes_per_block=worker.bytes_per_block,
    )


def _blocks(worker: Worker, http: httpx.Client) -> tuple[int, int | None]:
    """In use, and in the prefix cache."""
    if worker.stock:
        return _in_use(_get(http, f"{worker.url}/metrics").text), None
    state = _get(http, f"{worker.url}/prefillshare/state").json()
    return state["num_blocks"] - 1 - state["free_blocks"], state.get("cached_blocks")


def _in_use(metrics: str) -> int:
    return round(_metric(metrics, _USAGE) * _total_blocks(metrics))


def _total_blocks(metrics: str) -> int:
    found = _BLOCKS.search(metrics)
    return int(found[1]) - 1 if found else 0


def _metric(text: str, name: str) -> float:
    """A metric of vLLM's, over all its labels; 0 before it was first counted."""
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def _get(http: httpx.Client, url: str) -> httpx.Response:
    return http.get(url).raise_for_status()


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _sum(so_far: int | None, more: int | None) -> int | None:
    return so_far if more is None else (so_far or 0) + more


def _max(so_far: int | None, other: int | None) -> int | None:
    return so_far if other is None else max(so_far or 0, other)
