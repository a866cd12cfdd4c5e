"""MOCK KV memory: numbered blocks with tags in them, and what the workers of a cluster share."""

import asyncio
import itertools
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from tests.mocks.mock_pair_language import BASE, Tag, Vocabulary, base_tags

if TYPE_CHECKING:
    from tests.mocks.mock_pair_prefill import PairPrefill

BLOCK = 16
MARK = re.compile(r"#(\d+)\b")
"""Every prompt of a test names its call; the last name in it counts."""


class Clock:
    """Wall clock of the mock workers: it runs with the event loop, and a test can put it on."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._start = time.time() - self.loop.time()

    def now(self) -> float:
        """Unix seconds."""
        return self._start + self.loop.time()

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass for leases only."""
        self._start += seconds


class Pool:
    """The KV blocks of one engine: finite, with a prefix cache of whole blocks.

    Block 0 stays empty, as vLLM's does. A block that nobody uses keeps its content, and its place
    in the cache, until it is taken for something else.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.tags: dict[int, list[Tag]] = {}
        """What lies in each block now."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._users: Counter[int] = Counter()
        self._cached: dict[int, int] = {}
        self._key_of: dict[int, int] = {}
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def free_blocks(self) -> int:
        """Blocks nobody uses, cached ones among them."""
        return len(self._free)

    def find(self, ids: Sequence[int], most: int) -> list[int]:
        """Cached blocks with the KV of the longest prefix of `ids`, at most so many."""
        found: list[int] = []
        for key in itertools.islice(block_keys(ids), most):
            if key not in self._cached:
                break
            found.append(self._cached[key])
        return found

    def take(self, cached: Sequence[int], fresh: int) -> list[int] | None:
        """Use the `cached` blocks and so many empty ones; None, and nothing taken, without room."""
        waiting = sum(1 for block in cached if block in self._free)
        if len(self._free) - waiting < fresh:
            return None
        for block in cached:
            self._free.pop(block, None)
            self._users[block] += 1
        return [*cached, *(self._empty() for _ in range(fresh))]

    def _empty(self) -> int:
        block, _ = self._free.popitem(last=False)
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._cached[key]
        self.tags[block] = []
        self._users[block] = 1
        return block

    def cache(self, ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Let later prompts find the whole blocks of `ids`, which lie in `blocks`."""
        for key, block in zip(block_keys(ids), blocks, strict=False):
            if key not in self._cached and block not in self._key_of:
                self._cached[key] = block
                self._key_of[block] = key

    def free(self, blocks: Sequence[int]) -> None:
        """Use `blocks` no longer; wakes those who wait for room."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                if block not in self._key_of:
                    # In a busy engine another request has it at once.
                    self.tags[block] = [Tag("garbage", block)] * BLOCK
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()

    async def freed(self, within_s: float) -> None:
        """Wait until blocks were freed, at most so long."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await asyncio.wait([waiter], timeout=within_s)

    def write(self, blocks: Sequence[int], tags: Sequence[Tag], start: int) -> None:
        """Put the `tags` of the positions from `start` on into the blocks of a sequence."""
        for position, tag in enumerate(tags[start:], start):
            content = self.tags.setdefault(blocks[position // BLOCK], [])
            del content[position % BLOCK :]
            content.append(tag)

    def read(self, blocks: Sequence[int], count: int) -> list[Tag]:
        """The first `count` positions of a sequence; "garbage" where nothing lies."""
        found: list[Tag] = []
        for number in range(-(-count // BLOCK)):
            content = self.tags.get(blocks[number], [])
            found += [*content, *[Tag("garbage", -1)] * (BLOCK - len(content))]
        return found[:count]


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks a prefill worker keeps for one reader."""

    router_id: str
    """X-Request-Id of the prefill call."""
    ids: list[int]
    blocks: list[int]
    expires_at: float
    read_by: str | None = None
    """The decode worker whose heartbeats keep it alive."""


@dataclass(eq=False)
class PairCluster:
    """The ledger: what all workers of one mock cluster share, and everything that went wrong."""

    words: Vocabulary
    random: Random
    lease_s: int = 120
    handoff_s: float = 5.0
    clock: Clock = field(default_factory=Clock)
    violations: list[str] = field(default_factory=list)
    """Reads of KV that is not the base's, and protocol errors of the router."""
    log: list[str] = field(default_factory=list)
    prompts: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    """Prompts that were prefilled, by call."""
    prefill: dict[int, "PairPrefill"] = field(default_factory=dict)
    """Prefill workers by the port decode workers pull from."""
    preempted: Counter[str] = field(default_factory=Counter)
    """How often each call lost its blocks to another one."""
    most_requests: int = 600
    """To workers, of one test; more are a storm of retries."""
    _requests: int = 0
    _calls: dict[tuple[int, ...], str] = field(default_factory=dict)

    def note(self, what: str) -> None:
        """Write a line into the log."""
        self.log.append(f"{self.clock.loop.time():9.3f}  {what}")

    def violated(self, what: str) -> None:
        self.note(f"VIOLATION {what}")
        self.violations.append(what)

    def wall_now(self) -> float:
        """What a worker's own clock shows; the router compares it with its own."""
        return time.time()

    def counted(self, what: str) -> None:
        """Count one generating request."""
        self._requests += 1
        if self._requests == self.most_requests:
            self.violated(f"{what}: {self._requests} worker requests, a storm")

    def call_of(self, ids: Sequence[int]) -> str:
        """The client's call a prompt belongs to."""
        key = tuple(ids)
        if key not in self._calls:
            marks = MARK.findall(self.words.decode(ids))
            self._calls[key] = marks[-1] if marks else "?"
        return self._calls[key]

    def check_base(self, what: str, ids: Sequence[int], tags: Sequence[Tag]) -> None:
        """A decoder is about to attend to `tags` as KV of `ids`: all must be the base's."""
        for position, (tag, true) in enumerate(zip(tags, base_tags(ids), strict=True)):
            if tag != true:
                kind = tag.weights if tag.weights != BASE else "other tokens'"
                self.violated(f"{what}: {kind} KV at position {position} of {len(ids)}")
                return


def block_keys(ids: Sequence[int]) -> "itertools.accumulate[int]":
    """A key for each whole block, over all tokens up to its end."""
    whole = range(0, len(ids) - len(ids) % BLOCK, BLOCK)
    blocks = (hash(tuple(ids[start : start + BLOCK])) for start in whole)
    return itertools.accumulate(blocks, lambda before, block: hash((before, block)))
