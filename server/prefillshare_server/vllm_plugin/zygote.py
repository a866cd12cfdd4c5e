"""A process that has imported vLLM and forks into workers, which so need not import it again.

`python -m prefillshare_server.vllm_plugin.zygote` says `ready`. Then each line of its input is an
order (see launch/zygote.py), which it answers with the process id of a worker; the next line lets
that one go on. It ends with its input.

A worker is forked by a process that ends at once, and becomes a child of the launcher, which adopts
orphans. So this process may die, and no worker notices.
"""

import gc
import importlib
import json
import os
import sys
import time
from typing import Any, TextIO

from prefillshare_server.vllm_plugin import require_supported_vllm, worker
from prefillshare_server.vllm_plugin.lifetime import die_with_parent

READY = "ready"

IMPORTED = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.model_executor.models.llama",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "prefillshare_server.vllm_plugin.connector",
    "prefillshare_server.vllm_plugin.endpoints",
    "prefillshare_server.vllm_plugin.scheduler",
)
"""What workers import on their way to the first request, as far as it takes time."""

_ADOPTION_S = 10.0


def main() -> None:
    """Serve orders until the input ends; in each worker, run it until it ends."""
    launcher = int(os.environ[worker.LAUNCHER_PID_ENV])
    die_with_parent(launcher)
    require_supported_vllm()
    # Whatever imports print belongs into the log.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _import_vllm()
    # A fork has only the thread that forks: another one's locks would stay locked there.
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise SystemExit(f"prefillshare: importing vLLM started {threads - 1} threads")
    gc.collect()
    # Collections in the workers would touch, and so copy, every page with objects.
    gc.freeze()
    print(READY, file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        waits, wakes = os.pipe()
        if (pid := _fork_orphan()) == 0:
            os.close(wakes)
            if not os.read(waits, 1):
                return  # The launcher does not know of it.
            os.close(waits)
            _become_worker(order, answers, launcher)
            worker.main()
            return
        os.close(waits)
        print(pid, file=answers)
        if sys.stdin.readline():
            os.write(wakes, b"!")
        os.close(wakes)


def _import_vllm() -> None:
    # pyarrow would start one when it is imported.
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    for name in IMPORTED:
        importlib.import_module(name)


def _fork_orphan() -> int:
    """Fork a process with a session of its own whose parent has ended.

    Returns 0 there, its process id here.
    """
    readable, writable = os.pipe()
    if (middle := os.fork()) == 0:
        if os.fork() == 0:
            os.setsid()
            os.write(writable, str(os.getpid()).encode())
            os.close(readable)
            os.close(writable)
            return 0
        os._exit(0)
    os.close(writable)
    pid = int(os.read(readable, 32))
    os.close(readable)
    # Once it is over, the launcher has adopted the orphan.
    os.waitpid(middle, 0)
    return pid


def _become_worker(order: dict[str, Any], answers: TextIO, launcher: int) -> None:
    """Take on what a process started for a worker has: streams, environment, arguments."""
    os.close(answers.fileno())
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for given, taken in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(given, taken)
    os.close(log)
    os.close(nothing)
    for name in order["unset"]:
        del os.environ[name]
    os.environ.update(order["set"])
    sys.argv = [worker.__file__, *order["argv"]]
    _name_process()
    deadline = time.monotonic() + _ADOPTION_S
    while os.getppid() != launcher and time.monotonic() < deadline:
        time.sleep(0.001)


def _name_process() -> None:
    """What `ps` shows."""
    import setproctitle

    setproctitle.setproctitle(" ".join(("python -m", worker.__name__, *sys.argv[1:])))


if __name__ == "__main__":
    main()
