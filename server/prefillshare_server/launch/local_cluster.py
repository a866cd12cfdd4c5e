"""All workers of a cluster on this machine, from start to stop."""

import asyncio
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from prefillshare_server.config import LORA_POOL, Cluster
from prefillshare_server.launch.decoders import decoders
from prefillshare_server.launch.plan import WorkerSpec, plan
from prefillshare_server.launch.process import (
    STOP_STARTING_TIMEOUT_S,
    OnEvent,
    State,
    WorkerFailedError,
    WorkerProcess,
)
from prefillshare_server.launch.supervisor import Supervisor
from prefillshare_server.launch.warmup import ANSWER_S, warm_up_pair
from prefillshare_server.launch.zygote import Zygote, can_fork
from prefillshare_server.models import store
from prefillshare_server.router.topology import Decoder, WorkerEndpoint

T = TypeVar("T")

_POLL_S = 0.2
_IMPORT_S = 120.0
_INFO_TIMEOUT_S = 2.0
_WARM_UP_AGAIN_S = 30.0
_LOADING_MARK = "Initializing a V1 LLM engine"


class LocalCluster:
    """Async context manager: inside it every worker is ready.

    Leaving it stops every worker, also when the start failed. Workers die with the thread that
    entered it, so run its event loop in a thread that lives on; forked ones with the process.
    """

    def __init__(
        self, cluster: Cluster, *, log_dir: Path | None = None, on_event: OnEvent | None = None
    ) -> None:
        self._cluster = cluster
        self.log_dir = log_dir or default_log_dir()
        self._on_event = on_event or _ignore
        self._workers: dict[str, WorkerProcess] = {}
        self._zygote: Zygote | None = None
        self._endpoints: tuple[WorkerEndpoint, ...] = ()
        self._decoders: Mapping[str, Decoder] = {}
        self._supervision: asyncio.Task[NoReturn] | None = None

    @property
    def endpoints(self) -> tuple[WorkerEndpoint, ...]:
        """Every worker, prefill workers first."""
        return self._endpoints

    @property
    def decoders(self) -> Mapping[str, Decoder]:
        """Who speaks for each role of the cluster file."""
        return self._decoders

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each worker's API process."""
        return {name: worker.pid for name, worker in self._workers.items()}

    async def __aenter__(self) -> Self:
        # Models may have to be built or downloaded first.
        specs = await asyncio.to_thread(plan, self._cluster, log_dir=self.log_dir)
        base_dir = store.resolve(self._cluster.base.model)
        self._decoders = await asyncio.to_thread(decoders, self._cluster, base_dir)
        try:
            await self._start(specs)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop every worker; returns when none of their processes is left.

        Raises WorkerFailedError for one that cannot be stopped, when the others are.
        """
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.wait({self._supervision})
        self._stop_zygote()
        stops = (worker.stop() for worker in self._workers.values())
        for failure in await asyncio.gather(*stops, return_exceptions=True):
            if failure is not None:
                raise failure

    async def supervise(self, on_event: OnEvent | None = None) -> NoReturn:
        """Start workers that die again, where they were, until cancelled or stopped.

        Raises WorkerFailedError when one fails to come back for good. `on_event` replaces the one
        that the start reports to.
        """
        self._on_event = on_event or self._on_event
        supervisor = Supervisor(self._workers, self._start_again, self._on_event)
        self._supervision = asyncio.create_task(supervisor.run())
        await self._supervision
        raise AssertionError("supervision ends with an error only")

    async def _start(self, specs: Sequence[WorkerSpec]) -> None:
        limit_s = self._cluster.timeouts.start_s
        unready = [spec.name for spec in specs]
        try:
            async with asyncio.timeout(limit_s), aiohttp.ClientSession() as http:
                await self._import_once(specs)
                self._endpoints = tuple(
                    await _all([self._until_serving(spec, http) for spec in specs])
                )
                await self._warm_up(http, unready)
        except TimeoutError:
            [slow, *_] = [spec for spec in specs if spec.name in unready]
            raise _too_slow(slow, limit_s) from None
        except WorkerFailedError as error:
            self._on_event(error.worker, "failed", error.reason)
            raise

    async def _until_serving(self, spec: WorkerSpec, http: aiohttp.ClientSession) -> WorkerEndpoint:
        """Start one worker and wait until it serves; once again if its port was taken."""
        try:
            return await self._start_once(spec, http)
        except WorkerFailedError:
            worker = self._workers.get(spec.name)
            if worker is None or not worker.failed_on_port:
                raise
            await worker.stop(STOP_STARTING_TIMEOUT_S)
            return await self._start_once(spec.on_new_ports(), http)

    async def _start_once(
        self, spec: WorkerSpec, http: aiohttp.ClientSession, *, restart: int = 0
    ) -> WorkerEndpoint:
        try:
            worker = self._workers[spec.name] = self._process(spec, restart)
        except OSError as error:
            raise WorkerFailedError(spec, f"it cannot be started: {error}") from error
        self._on_event(spec.name, "starting", f"port {spec.port}")
        loading = False
        while True:
            # A worker whose handshake port is taken does not end: it waits for ever.
            if not worker.running or worker.failed_on_port:
                raise worker.failure()
            if not loading and _LOADING_MARK in worker.log_tail:
                loading = True
                self._on_event(spec.name, "loading", str(spec.model))
            info = await _info(spec.endpoint, http)
            # Another worker may have taken the port, before ours could fail on it.
            if info is not None and info.pid == worker.pid:
                worker.serving = True
                return replace(
                    spec.endpoint,
                    block_size=info.block_size,
                    block_bytes=info.block_bytes,
                    num_blocks=info.num_blocks,
                )
            await asyncio.sleep(_POLL_S)

    async def _import_once(self, specs: Sequence[WorkerSpec]) -> None:
        """Have a process import vLLM for all workers. Without it they start, but more slowly."""
        forked = [spec for spec in specs if can_fork(spec)]
        if not forked:
            return
        for spec in forked:
            self._on_event(spec.name, "starting", "importing vLLM, once for all workers")
        try:
            self._zygote = Zygote(forked[0], self.log_dir / "zygote.log")
            async with asyncio.timeout(min(_IMPORT_S, self._cluster.timeouts.start_s / 2)):
                ready = await self._zygote.ready()
        except OSError:  # And TimeoutError, which is one.
            ready = False
        if not ready:
            self._stop_zygote()

    def _process(self, spec: WorkerSpec, restart: int) -> WorkerProcess:
        if self._zygote is not None and can_fork(spec):
            try:
                return WorkerProcess(spec, restart=restart, zygote=self._zygote)
            except OSError:
                self._stop_zygote()
        return WorkerProcess(spec, restart=restart)

    def _stop_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.stop()
            self._zygote = None

    async def _start_again(self, name: str) -> None:
        """Replace a worker that ended, on the same ports, and warm it up."""
        before, limit_s = self._workers[name], self._cluster.timeouts.start_s
        try:
            async with asyncio.timeout(limit_s), aiohttp.ClientSession() as http:
                worker = await self._start_once(before.spec, http, restart=before.restart + 1)
                self._endpoints = tuple(
                    worker if other.id == name else other for other in self._endpoints
                )
                self._on_event(name, "warming", worker.url)
                await self._warm_up_again(worker, http)
        except TimeoutError:
            raise _too_slow(before.spec, limit_s) from None
        self._on_event(name, "ready", worker.url)

    async def _warm_up_again(self, worker: WorkerEndpoint, http: aiohttp.ClientSession) -> None:
        """Warm up with every worker it works with and that is up; their failures are not its."""

        async def attempt(other: WorkerEndpoint) -> None:
            pair = (other, worker) if other.phase == "prefill" else (worker, other)
            with suppress(aiohttp.ClientError):
                await warm_up_pair(*pair, http, answer_s=_WARM_UP_AGAIN_S)

        up = {name for name, other in self._workers.items() if other.running and other.serving}
        await _all([attempt(other) for other in self._partners(worker) if other.id in up])
        if not self._workers[worker.id].running:
            raise self._workers[worker.id].failure()

    async def _warm_up(self, http: aiohttp.ClientSession, unready: list[str]) -> None:
        """Decode workers warm up side by side, each with one prefill worker after another."""
        decode = [endpoint for endpoint in self._endpoints if endpoint.phase != "prefill"]

        def ready(worker: WorkerEndpoint) -> None:
            unready.remove(worker.id)
            self._on_event(worker.id, "ready", worker.url)

        async def warm_up_decode(worker: WorkerEndpoint) -> None:
            for other in self._partners(worker):
                await self._warm_up_pair(other, worker, http)
            if worker.pool == LORA_POOL:
                await self._load_adapters(worker, http)
            ready(worker)

        for endpoint in self._endpoints:
            self._on_event(endpoint.id, "warming", endpoint.url)
        await _all([warm_up_decode(worker) for worker in decode])
        for worker in self._endpoints:
            if worker.phase == "prefill":
                ready(worker)

    def _partners(self, worker: WorkerEndpoint) -> list[WorkerEndpoint]:
        """Those that it answers calls with; a colocated engine does so alone."""
        if worker.phase == "colocated":
            return [worker]
        return [each for each in self._endpoints if work_together(worker, each, self._decoders)]

    async def _warm_up_pair(
        self, prefill: WorkerEndpoint, decode: WorkerEndpoint, http: aiohttp.ClientSession
    ) -> None:
        try:
            await warm_up_pair(prefill, decode, http)
        except aiohttp.ClientError as error:
            for worker in (self._workers[prefill.id], self._workers[decode.id]):
                if not worker.running:
                    raise worker.failure() from error
            message = f"warm-up with {prefill.id}: {error}"
            raise WorkerFailedError(self._workers[decode.id].spec, message) from error

    async def _load_adapters(self, worker: WorkerEndpoint, http: aiohttp.ClientSession) -> None:
        """So that a role's first call does not wait for it, and a bad one is found now."""
        names = {d.model for d in self._decoders.values() if d.pool == LORA_POOL} - {worker.model}
        for name in sorted(names):
            problem = await _load(worker, name, http)
            if problem is not None:
                process = self._workers[worker.id]
                if not process.running:
                    raise process.failure()
                roles = [role for role, d in self._decoders.items() if d.model == name]
                what = f"it cannot load the adapter of {', '.join(roles)} ({name}): {problem}"
                raise WorkerFailedError(process.spec, what)


def work_together(
    one: WorkerEndpoint, other: WorkerEndpoint, decoders: Mapping[str, Decoder]
) -> bool:
    """Whether one of them prefills what the other decodes."""
    if one.phase == other.phase:
        return False
    prefill, decode = (one, other) if one.phase == "prefill" else (other, one)
    return prefill.pool is None or decoders[prefill.pool].pool == decode.pool


async def _load(worker: WorkerEndpoint, name: str, http: aiohttp.ClientSession) -> str | None:
    """Have a worker load an adapter; returns what is wrong, if anything."""
    try:
        async with http.post(
            f"{worker.url}/prefillshare/adapters",
            json={"name": name},
            timeout=aiohttp.ClientTimeout(total=ANSWER_S),
        ) as response:
            return None if response.status == 200 else await response.text()
    except TimeoutError:
        return f"no answer within {ANSWER_S} s"
    except aiohttp.ClientError as error:
        return str(error)


async def _all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all; the first failure ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _too_slow(spec: WorkerSpec, limit_s: float) -> WorkerFailedError:
    return WorkerFailedError(
        spec, f"not ready within {limit_s:g} s; raise timeouts.start_s if the machine is slow"
    )


class _Info(BaseModel):
    """What a worker says of itself, as far as it matters here."""

    pid: int
    block_size: int
    block_bytes: int
    num_blocks: int


async def _info(endpoint: WorkerEndpoint, http: aiohttp.ClientSession) -> _Info | None:
    """The worker's description of itself; None while it does not serve yet."""
    try:
        # Whoever else may listen there need not answer, nor in our terms.
        timeout = aiohttp.ClientTimeout(total=_INFO_TIMEOUT_S)
        async with http.get(f"{endpoint.url}/prefillshare/info", timeout=timeout) as response:
            if response.status != 200:
                return None
            return _Info.model_validate_json(await response.read())
    except (aiohttp.ClientError, TimeoutError, ValidationError):
        return None


def default_log_dir() -> Path:
    """A new folder beside the model store, named by the time and this process."""
    return store.home().parent / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _ignore(worker: str, state: State, detail: str) -> None:
    """Nobody watches."""
