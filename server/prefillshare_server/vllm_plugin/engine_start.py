"""Start the engine process by fork where vLLM's CPU platform insists on `spawn`.

A spawned engine imports torch and vLLM once more: a third of the CPU time that starting a worker
takes. Elsewhere vLLM itself forks. Its reason against it on CPU, the OpenMP settings of a third
process, does not hold for an engine in one process with one thread: the launcher asks for a fork
only then (more threads could find the pool of the parent, without its threads).
"""

import multiprocessing
from multiprocessing.context import BaseContext

FORK_ENGINE_ENV = "PREFILLSHARE_FORK_ENGINE"
"""Set by the launcher when the engine process is to be forked."""


def fork_engine_process() -> None:
    """Replace vLLM's choice of how the engine process starts. Idempotent."""
    from vllm.v1.engine import utils

    utils.get_mp_context = _fork


def _fork() -> BaseContext:
    return multiprocessing.get_context("fork")
