"""A real cluster and its router inside the test process, on a background event loop."""

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from prefillshare_server.config import Cluster
from prefillshare_server.launch.local_cluster import LocalCluster
from prefillshare_server.launch.process import State
from prefillshare_server.models import store
from prefillshare_server.router.app import create_app
from prefillshare_server.router.parts import Router
from prefillshare_server.router.topology import WorkerEndpoint
from tests.patience import patient

START_S = 300
STOP_S = 120
READY_S = 240

PATIENCE_S = 60.0
"""A worker or the router that stands still for some seconds on a busy machine is no failed worker:
it neither leaves a call without an account, nor takes a session off its worker."""

Reach = Callable[[WorkerEndpoint], WorkerEndpoint]
"""How the router is to reach a worker: itself, or something in front of it."""


@dataclass(frozen=True)
class Served:
    """Where the running cluster is reached, and how to break it."""

    url: str
    workers: tuple[WorkerEndpoint, ...]
    router: Router
    """Its parts, which live in another thread."""
    _cluster: LocalCluster
    _starts: Counter[str] = field(default_factory=Counter)
    """How often each worker became ready."""

    def worker(self, worker_id: str) -> WorkerEndpoint:
        """The worker with this id, itself rather than what the router reaches it through."""
        [found] = [worker for worker in self.workers if worker.id == worker_id]
        return found

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each worker's API process, of its last start."""
        return self._cluster.pids

    def starts(self, worker_id: str) -> int:
        """How often this worker became ready."""
        return self._starts[worker_id]

    def kill(self, worker_id: str) -> Callable[[], None]:
        """SIGKILL to all processes of a worker; returns a wait until it is ready again."""
        before = self.starts(worker_id)
        # The API process leads a group with all of them.
        os.killpg(self.pids[worker_id], signal.SIGKILL)
        return lambda: self.wait_ready(worker_id, before + 1)

    def wait_ready(self, worker_id: str, starts: int) -> None:
        """Wait until this worker has become ready `starts` times."""
        deadline = time.monotonic() + READY_S
        while self.starts(worker_id) < starts:
            assert time.monotonic() < deadline, f"{worker_id} did not come back in {READY_S} s"
            time.sleep(0.05)


@contextmanager
def serve_in_thread(
    cluster: Cluster, *, log_dir: Path, supervised: bool = False, reach: Reach | None = None
) -> Iterator[Served]:
    """Start the workers and the router; stop both on leaving, also after a failure.

    `supervised`: workers that die are started again.
    """
    with patient(PATIENCE_S), _served(cluster, log_dir, supervised, reach) as served:
        yield served


@contextmanager
def _served(
    cluster: Cluster, log_dir: Path, supervised: bool, reach: Reach | None
) -> Iterator[Served]:
    ready = threading.Event()
    outcome: list[Served | BaseException] = []
    stop_requested: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    starts: Counter[str] = Counter()

    def count(worker: str, state: State, detail: str) -> None:
        starts[worker] += state == "ready"

    async def main() -> None:
        stop = asyncio.Event()
        stop_requested.append((asyncio.get_running_loop(), stop))
        async with LocalCluster(cluster, log_dir=log_dir, on_event=count) as workers:
            reached = [reach(worker) if reach else worker for worker in workers.endpoints]
            app = create_app(cluster, reached, store.resolve(cluster.base.model), workers.decoders)
            config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            supervising = asyncio.create_task(workers.supervise()) if supervised else None
            url, router = f"http://127.0.0.1:{port}", app.state.router
            outcome.append(Served(url, workers.endpoints, router, workers, starts))
            ready.set()
            await stop.wait()
            if supervising is not None:
                supervising.cancel()
                with suppress(asyncio.CancelledError):
                    await supervising
            server.should_exit = True
            await serving

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            outcome.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="served-cluster")
    thread.start()
    try:
        assert ready.wait(START_S), f"the cluster was not ready after {START_S} s"
        first = outcome[0]
        if isinstance(first, BaseException):
            raise first
        yield first
    finally:
        for loop, stop in stop_requested:
            # It is closed where the cluster has failed.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
        thread.join(STOP_S)
        assert not thread.is_alive(), f"the cluster did not stop within {STOP_S} s"
    for late in outcome[1:]:
        if isinstance(late, BaseException):
            raise late
