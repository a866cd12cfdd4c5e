"""Small processes in place of vLLM, for tests of how the launcher treats whatever it started."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefillshare_server.config import Cluster
from prefillshare_server.launch.local_cluster import LocalCluster
from prefillshare_server.launch.plan import WorkerSpec
from prefillshare_server.launch.ports import free_ports

CLUSTER = Cluster.model_validate(
    {
        "base": {"model": "tiny-base"},
        "roles": {"solver": {"model": "tiny-a"}},
        "timeouts": {"start_s": 120},
    }
)

SERVER = """
import http.server, json, os, sys

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        info = {"pid": os.getpid(), "block_size": 16, "block_bytes": 64, "num_blocks": 8}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(info).encode())

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


PORT = "PORT"
"""In a command: the port, which is another one if that was taken meanwhile."""


@dataclass(frozen=True, slots=True)
class StandIn(WorkerSpec):
    """A worker whose process is something else."""

    @property
    def command(self) -> list[str]:
        return [str(self.port) if word == PORT else word for word in self.argv]


def stand_in(log: Path, *command: str, port: int = 1) -> StandIn:
    """A process that serves nothing."""
    name = log.stem
    return StandIn(
        name=name,
        phase="prefill",
        pool=None,
        model=Path("none"),
        served_name="base",
        port=port,
        side_channel_port=1,
        argv=command,
        env={},
        log=log,
    )


def serving_stand_in(log: Path) -> StandIn:
    """A process that describes itself as a worker does."""
    (port,) = free_ports(1)
    return stand_in(log, sys.executable, "-I", "-S", "-c", SERVER, PORT, port=port)


def cluster_of(patch: pytest.MonkeyPatch, *specs: WorkerSpec) -> LocalCluster:
    """A cluster of these. Without decode workers, none of them is warmed up."""
    patch.setattr("prefillshare_server.launch.local_cluster.plan", lambda *_, **__: specs)
    return LocalCluster(CLUSTER, log_dir=specs[0].log.parent)
