"""MOCK worker process: an HTTP server that can be killed and started again on the same port."""

import asyncio
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import ClientConnectionResetError, web

from prefillshare_server.router.topology import WorkerEndpoint
from tests.mocks.mock_pair_faults import Fault, FaultPlan
from tests.mocks.mock_pair_ledger import PairCluster, Pool
from tests.mocks.ports import reserved_port

SILENCE_S = 100_000.0


class Engine:
    """What a worker loses when it is killed."""

    def __init__(self, num_blocks: int) -> None:
        self.id = uuid.uuid4().hex
        self.pool = Pool(num_blocks)
        self.dead = False
        self.running = 0
        self.waiting = 0


class PairWorker:
    """What both kinds have in common."""

    phase: str

    def __init__(self, cluster: PairCluster, worker_id: str, num_blocks: int) -> None:
        self.cluster = cluster
        self.id = worker_id
        self.num_blocks = num_blocks
        self.plan = FaultPlan()
        self.port = 0
        self.up = False
        self.downs: list[tuple[float, float]] = []
        """When it was killed and when it came back, on the loop's clock."""
        self.skew_s = 0.0
        """How far its clock is ahead of the router's."""
        self.open_requests = 0
        self.serving: Counter[str] = Counter()
        """Calls of clients whose generating requests are open."""
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._place: socket.socket | None = None
        """Keeps its port for it while it is down."""
        self._returning: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> WorkerEndpoint:
        """As the router is told of it, once it runs."""
        raise NotImplementedError

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._health),
            web.get("/prefillshare/info", self._info),
            web.get("/prefillshare/state", self._state),
        ]

    def boot(self) -> None:
        """Begin with an empty engine."""
        raise NotImplementedError

    async def start(self) -> None:
        """Listen; on the same port as before where there was one."""
        if self._runner is None:
            app = web.Application(middlewares=[self._counted()], client_max_size=2**26)
            app.add_routes(self.routes())
            # As vLLM does: a closed connection ends its request.
            self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
            await self._runner.setup()
        self.boot()
        protocol = self._runner.server
        assert protocol is not None
        loop = asyncio.get_running_loop()
        self._place = self._place or reserved_port()
        self.port = self._place.getsockname()[1]
        self._listener = await loop.create_server(protocol, "127.0.0.1", self.port)
        self.up = True

    def kill(self, down_s: float | None = None) -> None:
        """Refuse and break all connections, lose all KV; come back after `down_s` if given."""
        if not self.up:
            return
        self.up = False
        now = asyncio.get_running_loop().time()
        self.downs.append((now, now + down_s if down_s is not None else float("inf")))
        self.cluster.note(f"{self.id} is killed, serving calls {sorted(self.serving)}")
        assert self._listener is not None
        assert self._runner is not None
        assert self._runner.server is not None
        self.engine.dead = True
        self._listener.close()
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        if down_s is not None:
            task = asyncio.get_running_loop().create_task(self._return(down_s))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

    async def _return(self, down_s: float) -> None:
        await asyncio.sleep(down_s)
        await self.restart()

    async def restart(self) -> None:
        """Come back now, with a new engine; does nothing to a worker that runs."""
        if self.up:
            return
        killed_at, _ = self.downs[-1]
        self.downs[-1] = (killed_at, asyncio.get_running_loop().time())
        await self.start()
        self.cluster.note(f"{self.id} is back")

    async def close(self) -> None:
        """End for good."""
        for task in [*self._returning]:
            task.cancel()
        await asyncio.gather(*self._returning, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._place is not None:
            self._place.close()

    @property
    def engine(self) -> Engine:
        raise NotImplementedError

    def leaks(self) -> list[str]:
        """What is still in use although nothing should run."""
        if not self.up:
            return []
        engine, found = self.engine, []
        if engine.pool.free_blocks != self.num_blocks - 1:
            found.append(f"{self.id}: {self.num_blocks - 1 - engine.pool.free_blocks} KV blocks")
        if engine.running or engine.waiting:
            found.append(f"{self.id}: {engine.running + engine.waiting} sequences")
        if self.open_requests:
            found.append(f"{self.id}: {self.open_requests} open HTTP requests")
        return found

    def struck(self, fault: Fault, call: str) -> None:
        """Write down that `fault` happens now."""
        fault.fired_at = asyncio.get_running_loop().time()
        fault.call = call
        self.cluster.note(f"{self.id} fault {fault.kind} after {fault.after} on call {call}")

    @contextmanager
    def serves(self, call: str) -> Iterator[None]:
        """Count a request of `call` as open for as long as the block runs."""
        self.serving[call] += 1
        try:
            yield
        finally:
            self.serving[call] -= 1
            if not self.serving[call]:
                del self.serving[call]

    async def drop(self, request: web.Request) -> web.StreamResponse:
        """Break the connection of `request`."""
        if request.transport is not None:
            request.transport.abort()
        await asyncio.sleep(SILENCE_S)  # Cancelled by the broken connection.
        raise AssertionError("a dropped request lives on")

    def _counted(self) -> Any:
        @web.middleware
        async def count(
            request: web.Request,
            handler: Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]],
        ) -> web.StreamResponse:
            self.open_requests += 1
            try:
                return await handler(request)
            except ClientConnectionResetError:
                return web.Response()  # Nobody reads it.
            finally:
                self.open_requests -= 1

        return count

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response(self.info())

    def info(self) -> dict[str, Any]:
        """What the worker says about itself."""
        return {
            "phase": self.phase,
            "base_fingerprint": FINGERPRINT,
            "block_size": 16,
            "block_bytes": 1024,
            "num_blocks": self.num_blocks,
            "max_model_len": 2048,
            "engine_id": self.engine.id,
            "now": self.cluster.wall_now() + self.skew_s,
        }

    async def _state(self, request: web.Request) -> web.Response:
        return web.json_response(self.state())

    def state(self) -> dict[str, Any]:
        """Live numbers of the engine."""
        engine = self.engine
        return {
            "num_blocks": self.num_blocks,
            "free_blocks": engine.pool.free_blocks,
            "open_leases": 0,
            "running": engine.running,
            "waiting": engine.waiting,
            "base_tokens_received": 0,
            "base_tokens_reused": 0,
            "prompt_tokens_computed": 0,
            "generated_tokens_recomputed": 0,
            "handoff_bytes": 0,
            "events": {},
            "now": self.cluster.clock.now() + self.skew_s,
        }


FINGERPRINT = "f" * 16


def error_answer(status: int, message: str, code: int | str) -> web.Response:
    """An error as vLLM words it."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return web.json_response(body, status=status)
