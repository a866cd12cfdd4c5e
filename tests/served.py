"""A real cluster and its router inside the test process, on a background event loop."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from prefillshare_server.config import Cluster
from prefillshare_server.launch.local_cluster import LocalCluster
from prefillshare_server.models import store
from prefillshare_server.router.app import create_app
from prefillshare_server.router.topology import WorkerEndpoint

START_S = 300
STOP_S = 60


@dataclass(frozen=True)
class Served:
    """Where the running cluster is reached."""

    url: str
    workers: tuple[WorkerEndpoint, ...]

    def worker(self, worker_id: str) -> WorkerEndpoint:
        """The worker with this id."""
        [found] = [worker for worker in self.workers if worker.id == worker_id]
        return found


@contextmanager
def serve_in_thread(cluster: Cluster, *, log_dir: Path) -> Iterator[Served]:
    """Start the workers and the router; stop both on leaving, also after a failure."""
    ready = threading.Event()
    outcome: list[Served | BaseException] = []
    stop_requested: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        stop = asyncio.Event()
        stop_requested.append((asyncio.get_running_loop(), stop))
        async with LocalCluster(cluster, log_dir=log_dir) as workers:
            app = create_app(cluster, workers.endpoints, store.resolve(cluster.base.model))
            config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            outcome.append(Served(f"http://127.0.0.1:{port}", workers.endpoints))
            ready.set()
            await stop.wait()
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
            if not loop.is_closed():
                loop.call_soon_threadsafe(stop.set)
        thread.join(STOP_S)
        assert not thread.is_alive(), f"the cluster did not stop within {STOP_S} s"
