"""MOCK prefill worker of the pair: computes base KV into its blocks and leases them to a reader."""

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from aiohttp import web

from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.vllm_plugin.handoff import prompt_digest
from tests.mocks.mock_pair_faults import Fault
from tests.mocks.mock_pair_language import BASE, Tag, extended
from tests.mocks.mock_pair_ledger import BLOCK, Lease, PairCluster
from tests.mocks.mock_pair_server import (
    FINGERPRINT,
    SILENCE_S,
    Engine,
    PairWorker,
    error_answer,
)

KNOWN_RELEASES = 256

AHEAD = "ahead"
"""In place of a call's number."""

_WITHOUT_LEASE = frozenset(
    {"hang_after_grant", "drop_after_grant", "error_after_grant", "bad_json", "kill_after_answer"}
)
"""What can happen to an answer that says nothing of a lease."""


class PrefillEngine(Engine):
    """Adds the leases, and the requests that must not get one."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.leases: dict[str, Lease] = {}
        """By the request id decode workers know."""
        self.prefills: dict[str, asyncio.Event] = {}
        """Waiting and running requests by X-Request-Id, with what aborts them."""
        self.released: OrderedDict[str, None] = OrderedDict()

    def free(self, remote_request_id: str) -> bool:
        """End a lease; False if it is not open."""
        lease = self.leases.pop(remote_request_id, None)
        if lease is not None:
            self.pool.free(lease.blocks)
        return lease is not None


class PairPrefill(PairWorker):
    """A mock prefill worker; its engine id is new after every start."""

    phase = "prefill"

    def __init__(self, cluster: PairCluster, worker_id: str, num_blocks: int) -> None:
        super().__init__(cluster, worker_id, num_blocks)
        self.compute_s = 0.004
        """For a prompt; plus a thousandth of it per token that is not cached."""
        self.answer_s = 0.001
        """From the granted lease to the answer's first byte."""
        self.deaf = 0
        """So many of the next releases meet a broken connection."""
        self.missed_releases: set[str] = set()
        self.keeps_leases = False
        """Acknowledges releases and does nothing."""

    @property
    def engine(self) -> PrefillEngine:
        return self._engine

    def boot(self) -> None:
        self._engine = PrefillEngine(self.num_blocks)

    async def start(self) -> None:
        await super().start()
        self.cluster.prefill[self.port] = self

    @property
    def endpoint(self) -> WorkerEndpoint:
        return WorkerEndpoint(
            self.id, "prefill", None, self.url, "base", BLOCK, 1024, self.num_blocks
        )

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.post("/v1/completions", self._complete),
            web.post("/prefillshare/release", self._release),
        ]

    def state(self) -> dict[str, Any]:
        self.sweep()
        return super().state() | {"open_leases": len(self.engine.leases)}

    def sweep(self) -> None:
        """Free what is leased beyond its time; a reader's heartbeats keep a lease alive."""
        engine, now = self.engine, self.cluster.clock.now()
        for key, lease in list(engine.leases.items()):
            if lease.read_by is not None:
                lease.expires_at = max(lease.expires_at, now + self.cluster.lease_s)
            elif lease.expires_at < now:
                self.cluster.note(f"{self.id} lease of {lease.router_id[:8]} expires")
                engine.free(key)

    def leaks(self) -> list[str]:
        if self.up:
            self.sweep()
        found = super().leaks()
        if self.up and self.engine.leases:
            found.append(f"{self.id}: {len(self.engine.leases)} leases")
        return found

    # What decode workers do over the wire.

    def attend(self, engine_id: str, remote_request_id: str, reader: str | None) -> None:
        """A decode worker's heartbeats begin, or stop with None."""
        if self.up and engine_id == self.engine.id:
            self.sweep()
            lease = self.engine.leases.get(remote_request_id)
            if lease is not None:
                lease.read_by = reader

    def pull(
        self, engine_id: str, remote_request_id: str, blocks: Sequence[int], count: int, by: str
    ) -> list[Tag]:
        """The KV that lies in `blocks` now, whatever it is and whoever has them."""
        self.sweep()
        if engine_id != self.engine.id:
            self.cluster.violated(f"{by} pulled from an engine of {self.id} that is gone")
        elif remote_request_id not in self.engine.leases:
            self.cluster.violated(f"{by} pulled from {self.id} without a lease")
        return self.engine.pool.read(blocks, count)

    def pulled(self, engine_id: str, remote_request_id: str) -> None:
        """A decode worker needs the lease no longer."""
        if self.up and engine_id == self.engine.id:
            self.engine.free(remote_request_id)

    # What the router does over HTTP.

    async def _release(self, request: web.Request) -> web.StreamResponse:
        router_id = (await request.json())["request_id"]
        if self.deaf:
            self.deaf -= 1
            self.missed_releases.add(router_id)
            self.cluster.note(f"{self.id} drops a release")
            return await self.drop(request)
        engine = self.engine
        if self.keeps_leases:
            return web.Response(status=204)
        held = [key for key, lease in engine.leases.items() if lease.router_id == router_id]
        for key in held:
            engine.free(key)
        if router_id in engine.prefills:
            engine.prefills[router_id].set()
        elif not held:
            engine.released[router_id] = None
            while len(engine.released) > KNOWN_RELEASES:
                engine.released.popitem(last=False)
        return web.Response(status=204)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        ids: list[int] = body["prompt"]
        router_id = request.headers.get("X-Request-Id", "")
        # Ahead of a call, whose number its context may not hold yet.
        leased = "kv_transfer_params" in body
        with self.serves(call := self.cluster.call_of(ids) if leased else AHEAD):
            return await self._served(request, body, ids, router_id, call)

    async def _served(
        self,
        request: web.Request,
        body: dict[str, Any],
        ids: list[int],
        router_id: str,
        call: str,
    ) -> web.StreamResponse:
        self.cluster.counted(self.id)
        if call != AHEAD:
            self.cluster.prompts.setdefault(call, set()).add(tuple(ids))
        self._check(body, router_id)
        fault = self.plan.next()
        if fault is not None:
            self.struck(fault, call)
        self.cluster.note(f"{self.id} prefill {router_id[:8]} of call {call}: {len(ids)} tokens")
        if fault is not None and (refused := await self._refused(fault, request)):
            return refused
        if call == AHEAD:
            return await self._served_ahead(request, router_id, ids, fault)
        params = await self._prefilled(self.engine, router_id, ids, fault)
        if params is None:
            return web.json_response({"choices": [{"finish_reason": "abort", "text": ""}]})
        await asyncio.sleep(self.answer_s)
        if fault is not None:
            return await self._after_grant(fault, request, params)
        return self._answer(params)

    async def _served_ahead(
        self, request: web.Request, router_id: str, ids: list[int], fault: Fault | None
    ) -> web.StreamResponse:
        cached = await self._computed(self.engine, router_id, ids)
        if cached is None:
            return web.json_response({"choices": [{"finish_reason": "abort", "text": ""}]})
        engine, blocks, tokens = cached
        if not engine.dead:
            engine.pool.free(blocks)
        await asyncio.sleep(self.answer_s)
        if fault is not None and fault.kind in _WITHOUT_LEASE:
            return await self._after_grant(fault, request, {})
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": tokens}}
        return web.json_response({"choices": [{"index": 0, "text": "x"}], "usage": usage})

    def _check(self, body: dict[str, Any], router_id: str) -> None:
        wrong = [
            what
            for what, bad in (
                ("no X-Request-Id", not router_id),
                ("not the base's model name", body["model"] != "base"),
                ("not one token, unstreamed", body["max_tokens"] != 1 or body.get("stream")),
                ("no do_remote_decode", not _asks_for_a_lease(body)),
                ("client fields", bool({"tools", "messages", "n"} & body.keys())),
            )
            if bad
        ]
        for what in wrong:
            self.cluster.violated(f"{self.id}: prefill request: {what}")

    async def _refused(self, fault: Fault, request: web.Request) -> web.StreamResponse | None:
        """What `fault` does before anything is computed."""
        match fault.kind:
            case "hang_before_grant":
                await asyncio.sleep(SILENCE_S)
            case "drop_before_grant":
                return await self.drop(request)
            case "status_500":
                return error_answer(500, "Internal server error", 500)
            case "slow":
                await asyncio.sleep(1.0)
            case "kill":
                self.kill(fault.down_s)
                await asyncio.sleep(SILENCE_S)
            case "no_params":
                return web.json_response({"choices": [{}], "kv_transfer_params": None})
            case "no_blocks":
                return self._answer({"do_remote_prefill": True, "remote_block_ids": [[]]})
        return None

    async def _prefilled(
        self, engine: PrefillEngine, router_id: str, ids: list[int], fault: Fault | None
    ) -> dict[str, Any] | None:
        """Compute and lease; None if the router gave the request up meanwhile."""
        done = await self._computed(engine, router_id, ids)
        return None if done is None else self._granted(*done, router_id, ids, fault)

    async def _computed(
        self, engine: PrefillEngine, router_id: str, ids: list[int]
    ) -> tuple[PrefillEngine, list[int], int] | None:
        """The blocks with the KV of `ids`, and how many tokens of it were cached."""
        if router_id in engine.released:
            return None
        aborted = engine.prefills[router_id] = asyncio.Event()
        engine.waiting += 1
        try:
            # The last token is always computed, for its logits.
            cached = engine.pool.find(ids, (len(ids) - 1) // BLOCK)
            fresh = -(-len(ids) // BLOCK) - len(cached)
            while (blocks := engine.pool.take(cached, fresh)) is None:
                await engine.pool.freed(0.5)
                if aborted.is_set():
                    return None
                self.sweep()
                cached = engine.pool.find(ids, (len(ids) - 1) // BLOCK)
                fresh = -(-len(ids) // BLOCK) - len(cached)
        finally:
            engine.waiting -= 1
            del engine.prefills[router_id]
        engine.prefills[router_id] = aborted
        engine.running += 1
        granted = False
        try:
            uncached = len(ids) - len(cached) * BLOCK
            seconds = self.compute_s * (1 + uncached / 1000)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await aborted.wait()
            if aborted.is_set():
                return None
            known = engine.pool.read(blocks, len(cached) * BLOCK)
            tags = extended(known, BASE, ids[len(known) :])
            engine.pool.write(blocks, tags, len(known))
            engine.pool.cache(ids, blocks)
            granted = True
        finally:
            engine.running -= 1
            del engine.prefills[router_id]
            if not granted and not engine.dead:
                engine.pool.free(blocks)
        return engine, blocks, len(cached) * BLOCK

    def _granted(
        self,
        engine: PrefillEngine,
        blocks: list[int],
        cached_tokens: int,
        router_id: str,
        ids: list[int],
        fault: Fault | None,
    ) -> dict[str, Any]:
        lease_s = self.cluster.lease_s if fault is None or fault.kind != "expired" else 2
        expires_at = self.cluster.clock.now() + lease_s
        remote_id = f"cmpl-{router_id}-0-{uuid.uuid4().hex[:8]}"
        engine.leases[remote_id] = Lease(router_id, ids, blocks, expires_at)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": engine.id,
            "remote_request_id": remote_id,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": 1,
            "remote_prefill_cached_tokens": cached_tokens,
            "prefillshare": {
                "base_len": len(ids),
                "base_fingerprint": FINGERPRINT,
                "expires_at": expires_at,
                "prompt_digest": prompt_digest(ids),
            },
        }

    async def _after_grant(
        self, fault: Fault, request: web.Request, params: dict[str, Any]
    ) -> web.StreamResponse:
        """What `fault` does although the lease is granted."""
        match fault.kind:
            case "hang_after_grant":
                await asyncio.sleep(SILENCE_S)
            case "drop_after_grant":
                return await self.drop(request)
            case "error_after_grant":
                return error_answer(500, "Internal server error", 500)
            case "bad_json":
                return web.Response(text='{"choices": [', content_type="application/json")
            case "malformed_fields":
                del params["prefillshare"], params["remote_engine_id"]
            case "malformed_types":
                params |= {"remote_port": "none", "prefillshare": "yes"}
            case "malformed_blocks":
                params["remote_block_ids"] = [params["remote_block_ids"][0], [1]]
            case "kill_after_answer":
                asyncio.get_running_loop().call_later(0.001, self.kill, fault.down_s)
        return self._answer(params)

    def _answer(self, params: dict[str, Any]) -> web.Response:
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        return web.json_response({"choices": [choice], "kv_transfer_params": params})


def _asks_for_a_lease(body: dict[str, Any]) -> bool:
    """True also of a prefill ahead, which says nothing of one."""
    params = body.get("kv_transfer_params", {"do_remote_decode": True})
    return bool(params.get("do_remote_decode"))
