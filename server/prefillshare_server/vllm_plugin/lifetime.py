"""No process of a worker outlives the process that started it."""

import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process as soon as its parent ends, however the parent ends.

    `parent_pid` is the process expected to be the parent; children made by `multiprocessing` know
    theirs. A parent that ended before this call is noticed by the changed parent id.
    The kernel watches the parent *thread*: start children from a thread that lives on.
    """
    if parent_pid is None and (parent := multiprocessing.parent_process()) is not None:
        parent_pid = parent.pid
    _be_killed_with_parent()
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def _be_killed_with_parent() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prefillshare: prctl(PR_SET_PDEATHSIG) failed")


_hook_registered = False


def forks_die_with_parent() -> None:
    """Let every fork of this process die with the process that forked it. Idempotent.

    A forked engine process does not load vLLM's plug-ins again, and a fork does not inherit the
    kernel's setting. Programs started by `subprocess` are not affected.
    """
    global _hook_registered
    if not _hook_registered:
        os.register_at_fork(after_in_child=_be_killed_with_parent)
        _hook_registered = True
