"""The check that nothing is left behind sees what it is there to see."""

import os
import signal
import subprocess

from tests.conftest import _present


def test_a_process_whose_parent_ended_counts_as_left_behind() -> None:
    before = _present()
    launched = subprocess.run(
        ["sh", "-c", "setsid sleep 60 > /dev/null 2>&1 & echo $!"],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    orphan = int(launched.stdout)
    try:
        assert any(left.startswith(f"process {orphan}:") for left in _present() - before)
    finally:
        os.kill(orphan, signal.SIGKILL)
        os.waitpid(orphan, 0)
