"""Code that a model wrote can do no harm and leaves nothing behind."""

import os
import resource
from pathlib import Path

import pytest

from prefillshare_server.errors import ConfigError
from prefillshare_training.evaluate import sandbox, sandbox_child

PATIENT_S = 120
"""For programs that come to an end: on a busy machine an interpreter may take long to start."""

ENDLESS = "import time\nwhile True: time.sleep(9)"
OVER = {"timeout", "killed"}
"""What ends a program that computes for ever: its time, or its CPU time where nobody looks then."""


def passes(code: str) -> bool:
    return sandbox.run(code, timeout_s=PATIENT_S).passed


def failure(code: str, *, timeout_s: float = PATIENT_S, **limits: int) -> str:
    outcome = sandbox.run(code, timeout_s=timeout_s, **limits)
    assert not outcome.passed
    return outcome.reason


def test_a_program_that_ends_well_passes() -> None:
    assert passes("import math, collections\nassert math.sqrt(9) == 3")


def test_a_failed_assertion_is_named() -> None:
    assert failure("assert 1 == 2, 'one is not two'") == "AssertionError: one is not two"


def test_code_that_is_no_python_fails() -> None:
    assert failure("def f(:").startswith("SyntaxError")


@pytest.mark.parametrize(
    "leave", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"]
)
def test_leaving_before_the_tests_is_no_pass(leave: str) -> None:
    assert failure(f"{leave}\nassert False") in {"SystemExit: 0", "SystemExit: ", "killed"}


def test_a_program_that_does_not_end_is_ended() -> None:
    assert failure(ENDLESS, timeout_s=0.5) == "timeout"


def test_an_infinite_loop_is_ended() -> None:
    assert failure("while True: pass", timeout_s=0.5) in OVER


def test_a_loop_that_ignores_signals_is_ended() -> None:
    code = (
        "import signal\n"
        "for each in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(each, signal.SIG_IGN)\n"
        "while True:\n"
        "    try:\n"
        "        while True: pass\n"
        "    except BaseException: pass\n"
    )
    assert failure(code, timeout_s=0.5) in OVER


def test_memory_is_limited() -> None:
    assert failure("x = bytearray(4 << 30)") == "MemoryError: "


def test_memory_is_limited_in_small_steps() -> None:
    code = "x = []\nwhile True: x.append(' ' * 1000000)"
    assert failure(code, memory_bytes=1 << 28) in {"MemoryError: ", "killed"}


@pytest.mark.parametrize(
    "start",
    [
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['/bin/true'])",
        "import os\nos.execv('/bin/true', ['true'])",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
    ],
)
def test_no_process_is_started(start: str) -> None:
    assert failure(start).startswith(("PermissionError", "BlockingIOError"))


def test_a_fork_bomb_starts_nothing() -> None:
    code = (
        "import os\n"
        "started = 0\n"
        "for _ in range(100):\n"
        "    try:\n"
        "        os.fork(); started += 1\n"
        "    except OSError: pass\n"
        "assert not started"
    )
    assert passes(code)


def test_no_thread_is_started() -> None:
    code = "import threading\nthreading.Thread(target=print).start()"
    assert failure(code).startswith("RuntimeError: can't start new thread")


def test_no_network_is_reached() -> None:
    assert failure("import socket\nsocket.socket()").startswith("PermissionError")


def test_no_other_process_is_signalled() -> None:
    code = f"import os, signal\nos.kill({os.getpid()}, signal.SIGTERM)"
    assert failure(code).startswith("PermissionError")


def test_no_file_is_changed(tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    assert passes(f"assert open({str(victim)!r}).read() == 'mine'")
    for attack in (
        "open('notes.txt', 'w')",
        "import os\nos.makedirs('a/b')",
        f"open({str(victim)!r}, 'w')",
        f"open({str(victim)!r}, 'a')",
        f"open({str(victim)!r}, 'r+')",
        f"import os\nos.open({str(victim)!r}, os.O_RDONLY | os.O_TRUNC)",
        f"open({str(tmp_path / 'new.txt')!r}, 'w')",
        f"import os\nos.open({str(tmp_path)!r}, os.O_TMPFILE | os.O_WRONLY)",
        f"import os\nos.link({str(victim)!r}, {str(tmp_path / 'other')!r})",
        f"import os\nos.mkfifo({str(tmp_path / 'other')!r})",
        f"import os\nos.utime({str(victim)!r})",
        f"import os\nos.remove({str(victim)!r})",
        f"import os\nos.truncate({str(victim)!r}, 0)",
        f"import os\nos.rename({str(victim)!r}, {str(tmp_path / 'other')!r})",
        f"import os\nos.chmod({str(victim)!r}, 0)",
        f"import os\nos.symlink('/', {str(tmp_path / 'link')!r})",
    ):
        assert failure(attack).startswith("PermissionError"), attack
    assert [path.name for path in tmp_path.iterdir()] == ["victim.txt"]
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    "change",
    [
        "import socket\nsocket.sethostname(socket.gethostname())",
        "import time\ntime.clock_settime(time.CLOCK_REALTIME, time.time())",
        "import os\nos.chroot('.')",
        "import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "import os\nos.sched_setaffinity(os.getppid(), {0})",
    ],
)
def test_the_machine_is_not_changed(change: str) -> None:
    assert failure(change).startswith("PermissionError")


def test_limits_of_the_system_that_are_lower_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3, 5))
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    sandbox_child._limit({"memory_bytes": 100, "cpu_s": 4})
    assert limits[resource.RLIMIT_AS] == (5, 5)
    assert limits[resource.RLIMIT_CPU] == (4, 4)


def test_where_limits_cannot_be_set_nothing_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS, whose memory cannot be limited: ValueError, not OSError."""
    child = tmp_path / "child.py"
    source = Path(sandbox_child.__file__).read_text()
    child.write_text(source.replace("    limits = {", "    [].remove(1)\n    limits = {"))
    monkeypatch.setattr(sandbox, "_CHILD", child)
    with pytest.raises(ConfigError, match="cannot confine a program"):
        sandbox.run("pass", timeout_s=PATIENT_S)


def test_a_failure_is_one_whatever_the_program_replaced() -> None:
    code = "import os\nos._exit = lambda code: None\nassert False, 'wrong'"
    assert failure(code) == "AssertionError: wrong"


def test_a_flood_of_output_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys\n"
        "for _ in range(200):\n"
        "    print('x' * 100000)\n"
        "    print('x' * 100000, file=sys.stderr)"
    )
    assert passes(code)
    assert capfd.readouterr() == ("", "")


def test_the_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert passes("pass")
    assert failure(ENDLESS, timeout_s=0.5) == "timeout"
    assert list(tmp_path.iterdir()) == []


def test_the_environment_and_the_folder_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = (
        "import os\n"
        "assert 'HF_TOKEN' not in os.environ and os.listdir('.') == []\n"
        "assert not any('evaluate' in path for path in __import__('sys').path)"
    )
    assert passes(code)


def test_a_forged_report_is_no_pass() -> None:
    code = (
        "import os\n"
        "for fd in range(3, 20):\n"
        '    try: os.write(fd, b\'{"passed": "guess"}\')\n'
        "    except OSError: pass\n"
        "os._exit(0)"
    )
    assert failure(code) == "killed"


def test_a_flood_of_reports_ends_as_a_timeout() -> None:
    code = (
        "import os\n"
        "while True:\n"
        "    for fd in range(3, 20):\n"
        "        try: os.write(fd, b'x' * 4096)\n"
        "        except OSError: pass"
    )
    assert failure(code, timeout_s=0.5) == "timeout"
