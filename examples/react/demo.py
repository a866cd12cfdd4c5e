"""`make demo`: serve the example's cluster, run the example on it, stop everything.

Each step is the command a user would type; this script only puts them in order.
"""

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
REPORT = ROOT / "demo-report.json"

HELD_OUT = 10
"""Items of each role's job that the specialist and the base are compared on."""

READY_S = 600
RUN_S = 600
STOP_S = 60


def free_port() -> int:
    """A port that is free now: the demo also runs beside another server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_until_ready(url: str, server: "subprocess.Popen[bytes]") -> None:
    """Return when the router answers /health. Exits when the server ended or is too slow."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"`prefillshare serve` ended with code {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"`prefillshare serve` was not ready after {READY_S} s")


def stop(server: "subprocess.Popen[bytes]") -> None:
    """What Ctrl-C does: the server stops its workers and ends."""
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        raise SystemExit(f"`prefillshare serve` did not stop within {STOP_S} s") from None


def main() -> None:
    """Serve, run, stop; the exit code is the example's, or 130 after Ctrl-C."""
    # Without this, `kill` or a closed terminal would end this script and leave the server running.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        raise SystemExit(serve_and_run())
    except KeyboardInterrupt:
        raise SystemExit(130) from None


@contextmanager
def serving() -> Iterator[str]:
    """The example's cluster at a free port; yields the router's address. Ends what it started."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    prefillshare = Path(sys.executable).with_name("prefillshare")
    cluster = HERE / "cluster.yaml"
    command = [prefillshare, "serve", cluster, "--port", str(port)]
    # Its own process group, so that Ctrl-C here reaches it once, through stop().
    server = subprocess.Popen([str(part) for part in command], start_new_session=True)
    try:
        wait_until_ready(url, server)
        yield url
    finally:
        stop(server)


def serve_and_run() -> int:
    """The exit code of the example. Nothing runs any more when this returns or raises."""
    with serving() as url:
        example = [sys.executable, "-m", "examples.react", "--base-url", f"{url}/v1"]
        options = ["--held-out", str(HELD_OUT), "--report", str(REPORT)]
        run = subprocess.run([*example, *options], cwd=ROOT, timeout=RUN_S, check=False)
    if run.returncode == 0:
        print(f"\nEvery figure of this run is in {REPORT.name}.")
    return run.returncode


if __name__ == "__main__":
    main()
