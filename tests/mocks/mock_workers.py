"""MOCK workers for tests of the router: they speak the workers' HTTP and compute nothing.

A `MockCluster` keeps one ledger of KV leases for all its mock workers. It checks what the router
sends (a decode call must bring a lease that was made for exactly its token ids and not read
before) and can break in the ways real workers do. It proves nothing about vLLM: tests/engine does
that.
"""

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web
from tokenizers import Tokenizer

from prefillshare_server.router.topology import WorkerEndpoint
from tests.mocks.ports import reserved_port

BLOCK = 16
MAX_MODEL_LEN = 2048
SILENCE_S = 600

BLOCKS = 1025
"""KV blocks of every mock worker; vLLM keeps one of them for itself."""

PrefillFault = Literal[
    "drop", "grant_unseen", "hang", "no_blocks", "status_500", "status_400", "slow"
]


@dataclass
class Lease:
    """KV blocks that a mock prefill worker holds for one reader."""

    ids: list[int]
    params: dict[str, Any]
    request_id: str
    """X-Request-Id of the prefill call."""


@dataclass
class MockCluster:
    """The ledger all mock workers of a test share, and everything they saw."""

    tokenizer: Tokenizer
    leases: dict[str, Lease] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    """Protocol errors of the router; a test fails if there are any."""
    numbers: Any = field(default_factory=itertools.count)


def error_answer(status: int, message: str, code: int | str) -> web.Response:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return web.json_response(body, status=status)


class MockWorker:
    """What both kinds have in common: an HTTP server that counts open requests."""

    def __init__(self, cluster: MockCluster, worker_id: str) -> None:
        self.cluster = cluster
        self.id = worker_id
        self.requests: list[dict[str, Any]] = []
        """Bodies of generating requests."""
        self.request_ids: list[str] = []
        """Their X-Request-Ids, at prefill workers."""
        self.open_requests = 0
        """Questions about its health or an account do not count."""
        self.aborted = 0
        """Requests whose connection was closed under them."""
        self.url = ""
        self.engine_id = ""
        self.num_blocks = BLOCKS
        self.clock = time.time
        self.unhealthy = False
        self._place: socket.socket | None = None
        """Keeps its port for it while it is stopped."""
        self._starts = itertools.count(1)
        self._runner: web.AppRunner | None = None

    @property
    def endpoint(self) -> WorkerEndpoint:
        """As the router is told of it, once it runs."""
        raise NotImplementedError

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._health),
            web.get("/prefillshare/info", self._info),
        ]

    async def start(self) -> None:
        """Serve, with a fresh engine; once stopped, on the same port as before."""

        @web.middleware
        async def count(request: web.Request, handler: Any) -> Any:
            if request.method == "GET":
                return await handler(request)
            self.open_requests += 1
            try:
                return await handler(request)
            except asyncio.CancelledError:
                self.aborted += 1
                raise
            finally:
                self.open_requests -= 1

        app = web.Application(middlewares=[count], client_max_size=2**26)
        app.add_routes(self.routes())
        # As vLLM does: a closed connection ends its request.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        self._place = self._place or reserved_port()
        port = self._place.getsockname()[1]
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{port}"
        self.engine_id = f"{self.id}/{next(self._starts)}"

    async def stop(self) -> None:
        """From now on connections are refused."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def close(self) -> None:
        """End for good."""
        await self.stop()
        if self._place is not None:
            self._place.close()
            self._place = None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.unhealthy else 200)

    async def _info(self, request: web.Request) -> web.Response:
        info = {
            "engine_id": self.engine_id,
            "block_size": BLOCK,
            "num_blocks": self.num_blocks,
            "now": self.clock(),
        }
        return web.json_response(info)

    def expect(self, condition: bool, what: str) -> None:
        if not condition:
            self.cluster.violations.append(f"{self.id}: {what}")


class MockPrefill(MockWorker):
    """A mock prefill worker with a prefix cache of whole blocks."""

    def __init__(self, cluster: MockCluster, worker_id: str, role: str | None = None) -> None:
        """`role` is the one whose own prefill worker this is."""
        super().__init__(cluster, worker_id)
        self.role = role
        self.fault: PrefillFault | None = None
        self.faulty_calls: int | None = None
        """How many prefills `fault` meets before it goes by itself; `None`: all."""
        self.gate = asyncio.Event()
        """`slow` prefills wait for it."""
        self.failing_releases = 0
        """So many of the next releases are answered with an error."""
        self.released: list[str] = []
        """Request ids of the calls whose leases were given up, in order."""
        self._cache: set[tuple[Any, ...]] = set()
        """Beginnings of prompts up to the end of a block, behind their salt."""

    @property
    def endpoint(self) -> WorkerEndpoint:
        return WorkerEndpoint(
            self.id, "prefill", self.role, self.url, "base", BLOCK, 1024, self.num_blocks
        )

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.post("/v1/completions", self._complete),
            web.post("/prefillshare/release", self._release),
        ]

    async def stop(self) -> None:
        """Its KV is lost with it."""
        await super().stop()
        self._cache.clear()
        for key in [key for key in self.cluster.leases if key.startswith(f"{self.id}-")]:
            del self.cluster.leases[key]

    async def _release(self, request: web.Request) -> web.Response:
        request_id = (await request.json())["request_id"]
        if self.failing_releases:
            self.failing_releases -= 1
            return error_answer(500, "busy", 500)
        self.released.append(request_id)
        leases = self.cluster.leases
        for key in [key for key in leases if leases[key].request_id == request_id]:
            del leases[key]
        return web.Response(status=204)

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        ids = body["prompt"]
        call_id = request.headers.get("X-Request-Id", "")
        self.expect(bool(call_id), "no X-Request-Id")
        self.expect(call_id not in self.request_ids, "an X-Request-Id for the second time")
        self.request_ids.append(call_id)
        fault = self._fault_of_this_call()
        self.expect(body["model"] == "base", f"model {body['model']!r}")
        self.expect(body["max_tokens"] == 1 and not body["stream"], "not a plain prefill")
        params = body.get("kv_transfer_params")
        self.expect(params is None or params["do_remote_decode"], "no do_remote_decode")
        salt = body.get("cache_salt")
        self.expect(not {"tools", "messages", "n"} & body.keys(), f"extra fields {sorted(body)}")
        if fault == "hang":
            await asyncio.sleep(SILENCE_S)
        if fault == "grant_unseen":
            try:
                await asyncio.sleep(SILENCE_S)
            finally:
                self._lease(ids, salt, call_id, fault)
        if fault == "slow":
            await self.gate.wait()
        if fault == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault == "status_500":
            return error_answer(500, "Internal server error", 500)
        if fault == "status_400":
            return error_answer(400, "Token id 99999 is out of vocabulary", 400)
        if params is None:
            details = {"cached_tokens": cached} if (cached := self._computed(ids, salt)) else None
            usage = {"prompt_tokens": len(ids), "prompt_tokens_details": details}
            return web.json_response({"choices": [{}], "usage": usage})
        lease = self._lease(ids, salt, call_id, fault)
        return web.json_response({"choices": [{}], "kv_transfer_params": lease})

    def _fault_of_this_call(self) -> PrefillFault | None:
        if self.faulty_calls == 0:
            return None
        if self.faulty_calls is not None:
            self.faulty_calls -= 1
        return self.fault

    def _computed(self, ids: list[int], salt: str | None) -> int:
        """Fill the cache with `ids`; returns how many of them it had."""
        cached = 0
        # The last token is always computed, for its logits.
        while cached + BLOCK < len(ids) and (salt, *ids[: cached + BLOCK]) in self._cache:
            cached += BLOCK
        self._cache |= {(salt, *ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK)}
        return cached

    def _lease(
        self, ids: list[int], salt: str | None, call_id: str, fault: PrefillFault | None
    ) -> dict[str, Any]:
        cached = self._computed(ids, salt)
        number = next(self.cluster.numbers)
        given_up = fault == "no_blocks" or call_id in self.released
        blocks = 0 if given_up else -(-len(ids) // BLOCK)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(blocks))],
            "remote_engine_id": "engine",
            "remote_request_id": f"{self.id}-{number}",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "tp_size": 1,
            "remote_prefill_cached_tokens": cached,
            "prefillshare": {
                "base_len": len(ids),
                "base_fingerprint": "f" * 16,
                "expires_at": 0,
                "prompt_digest": "d" * 16,
            },
        }
        if blocks:
            self.cluster.leases[f"{self.id}-{number}"] = Lease(ids, params, call_id)
        return params


@asynccontextmanager
async def running(*workers: MockWorker) -> AsyncIterator[None]:
    """Serve on free ports for as long as the block runs."""
    try:
        for worker in workers:
            await worker.start()
        yield
    finally:
        for worker in workers:
            await worker.close()
