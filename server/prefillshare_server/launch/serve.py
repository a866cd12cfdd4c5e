"""`prefillshare serve`: workers and router of one cluster, from start to Ctrl-C."""

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from rich.console import Console

from prefillshare_server.config import Cluster
from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.launch.board import restart_news, start_board
from prefillshare_server.launch.local_cluster import LocalCluster
from prefillshare_server.launch.process import WorkerFailedError
from prefillshare_server.models import store
from prefillshare_server.router.app import create_app

GRACEFUL_STOP_S = 3
"""How long requests in flight may go on after Ctrl-C."""

_POLL_S = 0.01


def serve(cluster: Cluster, *, cluster_path: Path, console: Console) -> int:
    """Serve until Ctrl-C, SIGTERM or a closed terminal (exit code 0).

    A worker that dies is started again. The exit code is 1 if it does not come back, or if one
    fails during the start. No process is left when it returns. Raises ConfigError when the start
    cannot succeed.
    """
    return asyncio.run(_until_stopped(cluster, cluster_path, console))


async def _until_stopped(cluster: Cluster, cluster_path: Path, console: Console) -> int:
    serving = asyncio.create_task(_serve(cluster, cluster_path, console))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup a closed terminal is meant to change nothing.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, _stop_once, serving, console)
    try:
        await serving
    except asyncio.CancelledError:
        console.print("stopped")
        return 0
    except WorkerFailedError as error:
        console.print(f"[red]error[/red]: {error}", highlight=False, soft_wrap=True)
        return 1
    return 0


def _stop_once(serving: asyncio.Task[None], console: Console) -> None:
    # A second Ctrl-C must not interrupt the stop, which would leave processes behind.
    if not serving.cancelling():
        console.print("stopping …")
        serving.cancel()


async def _serve(cluster: Cluster, cluster_path: Path, console: Console) -> None:
    with _bound_socket(cluster) as listener:
        with start_board(console) as show:
            workers = LocalCluster(cluster, on_event=show)
            await workers.__aenter__()
        try:
            await _route(cluster, cluster_path, workers, listener, console)
        finally:
            await workers.stop()


async def _route(
    cluster: Cluster,
    cluster_path: Path,
    workers: LocalCluster,
    listener: socket.socket,
    console: Console,
) -> None:
    """Run the router until cancelled. Raises WorkerFailedError when a worker is given up."""
    app = create_app(
        cluster, workers.endpoints, store.resolve(cluster.base.model), workers.decoders
    )
    server = _Server(
        uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACEFUL_STOP_S)
    )
    routing = asyncio.create_task(server.serve(sockets=[listener]))
    supervising = asyncio.create_task(workers.supervise(restart_news(console)))
    try:
        while not server.started and not routing.done():
            await asyncio.sleep(_POLL_S)
        _announce(cluster, cluster_path, workers, listener, console)
        await asyncio.wait({routing, supervising}, return_when=asyncio.FIRST_COMPLETED)
        if supervising.done():
            await supervising
    finally:
        supervising.cancel()
        server.should_exit = True
        await routing


def _announce(
    cluster: Cluster,
    cluster_path: Path,
    workers: LocalCluster,
    listener: socket.socket,
    console: Console,
) -> None:
    host, port = listener.getsockname()[:2]
    console.print(
        f"[bold]http://{host}:{port}[/bold]  serves {cluster_path}: "
        f"{cluster.base.name} (base), {', '.join(cluster.roles)}\n"
        f"logs in {workers.log_dir}; Ctrl-C stops everything",
        highlight=False,
        soft_wrap=True,
    )


class _Server(uvicorn.Server):
    """Leaves signals to `serve`, which also has workers to stop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def _bound_socket(cluster: Cluster) -> Iterator[socket.socket]:
    """The router's address, taken before the workers start; it refuses connections until served."""
    host, port = cluster.router.host, cluster.router.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            problem = Problem(
                "router.port",
                f"cannot listen on {host}:{port} ({error.strerror})",
                "stop what listens there, or choose another with --port",
            )
            raise ConfigError(problem) from None
        yield listener
