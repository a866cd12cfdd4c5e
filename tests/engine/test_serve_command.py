"""`prefillshare serve`, as a user types it: ready, a call, Ctrl-C, nothing left."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.engine

PREFILLSHARE = Path(sys.executable).with_name("prefillshare")
CLUSTER = """\
version: 1
base: {model: tiny-base}
roles:
  writer: {model: tiny-a}
dtype: float32
max_model_len: 1024
kv: {blocks: 128}
"""
READY_S = 200
STOP_S = 30


def test_serve_answers_and_ctrl_c_stops_everything(tmp_path: Path) -> None:
    """That nothing is left afterwards is checked after every test: see tests/conftest.py."""
    cluster, output = tmp_path / "cluster.yaml", tmp_path / "output"
    cluster.write_text(CLUSTER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with output.open("wb") as sink:
        server = subprocess.Popen(
            [PREFILLSHARE, "serve", cluster, "--port", str(port)], stdout=sink, stderr=sink
        )
    try:
        deadline = time.monotonic() + READY_S
        while f"{url} " not in output.read_text():
            assert server.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.2)
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json={"model": "writer", "messages": [{"role": "user", "content": "Hello"}]}
            | {"max_tokens": 4, "ignore_eos": True},
            timeout=60,
        )
        assert answer.json()["usage"]["completion_tokens"] == 4
        server.send_signal(signal.SIGINT)
        assert server.wait(STOP_S) == 0
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    for worker in ("prefill-0", "writer-0"):
        assert f"{worker}: ready" in output.read_text()
