"""Runs inside the sandbox process, before and around the untrusted program; standard library only.

Reads ``{"code", "memory_bytes", "cpu_s", "token", "result_fd"}`` from stdin. Gives up, for good,
what the program must not do: start processes or threads, open sockets, signal others, change files
or the machine. Then runs it.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_ALLOW, _KILL, _EPERM = 0x7FFF0000, 0x80000000, 0x00050000 | 1

# The kernel's names of the architectures (linux/audit.h).
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# What is refused, and its number on either.
_REFUSED = """
clone                56  220
clone3              435  435
fork                 57    -
vfork                58    -
execve               59  221
execveat            322  281
kill                 62  129
tkill               200  130
tgkill              234  131
rt_sigqueueinfo     129  138
rt_tgsigqueueinfo   297  240
pidfd_open          434  434
pidfd_send_signal   424  424
socket               41  198
socketpair           53  199
io_uring_setup      425  425
ptrace              101  117
process_vm_writev   311  271
setsid              112  157
setpgid             109  154
unshare             272   97
setns               308  268
mount               165   40
setrlimit           160  164
prlimit64           302  261
creat                85    -
openat2             437  437
open_by_handle_at   304  265
truncate             76   45
unlink               87    -
unlinkat            263   35
rename               82    -
renameat            264   38
renameat2           316  276
mkdir                83    -
mkdirat             258   34
rmdir                84    -
link                 86    -
linkat              265   37
symlink              88    -
symlinkat           266   36
mknod               133    -
mknodat             259   33
utime               132    -
utimes              235    -
futimesat           261    -
utimensat           280   88
chmod                90    -
fchmod               91   52
fchmodat            268   53
fchmodat2           452  452
chown                92    -
lchown               94    -
fchown               93   55
fchownat            260   54
setxattr            188    5
lsetxattr           189    6
fsetxattr           190    7
removexattr         197   14
lremovexattr        198   15
fremovexattr        199   16
setpriority         141  140
sched_setaffinity   203  122
sched_setscheduler  144  119
shmget               29  194
msgget               68  186
semget               64  190
mq_open             240  180
memfd_create        319  279
"""
# What opens files, with the place of the flags among the arguments. Only reading is let through.
_OPENING = """
open                  2    -  1
openat              257   56  2
"""
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_UNKNOWN = 463
"""From here on, system calls are newer than this list."""

_CAPABILITIES_VERSION = 0x20080522
_READ_ANY_FILE = 0b110
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root's libraries may be another user's."""


def main() -> None:
    """Confine this process, run the program, and report through the pipe of the parent."""
    task = json.load(sys.stdin)
    result_fd = task["result_fd"]
    try:
        _limit(task)
        _confine()
    except (OSError, ValueError) as error:
        _report(result_fd, {"unconfined": str(error)})
    try:
        # Not as __main__: an answer's own example of use does not run.
        exec(compile(task["code"], "<answer>", "exec"), {})
    # Also SystemExit: a program that leaves before its tests ran has not passed them.
    except BaseException as error:
        verdict = {"failed": _described(error)}
    else:
        verdict = {"passed": task["token"]}
    _report(result_fd, verdict)


def _report(result_fd: int, verdict: dict[str, Any]) -> None:
    os.write(result_fd, json.dumps(verdict).encode())
    # Nothing that the program has registered for the end of the process runs.
    os._exit(0)


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:200]
    except BaseException:
        return type(error).__name__


def _limit(task: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_AS: task["memory_bytes"],
        resource.RLIMIT_CPU: task["cpu_s"],
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, wanted in limits.items():
        _, hard = resource.getrlimit(kind)
        # Only root could raise it.
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (value, value))


def _confine() -> None:
    """Raise OSError if the kernel cannot refuse system calls."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _AUDIT:
        raise OSError(f"{sys.platform} on {machine} is not supported")
    libc = ctypes.CDLL(None, use_errno=True)
    _call(libc.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _call(libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _drop_privileges(libc)
    column = 1 + list(_AUDIT).index(machine)
    refused = [int(row[column]) for row in _rows(_REFUSED) if row[column] != "-"]
    opening = {int(row[column]): int(row[3]) for row in _rows(_OPENING) if row[column] != "-"}
    program = _filter(_AUDIT[machine], refused, opening)
    code = ctypes.create_string_buffer(program)
    # struct sock_fprog: the number of instructions, and where they are.
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    _call(libc.prctl, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0)


def _rows(table: str) -> list[list[str]]:
    return [row.split() for row in table.strip().splitlines()]


def _filter(audit: int, refused: list[int], opening: dict[int, int]) -> bytes:
    """BPF that answers EPERM to what is refused and kills what speaks another ABI.

    `opening` has the place of the flags of each system call that opens files.
    """

    def load(offset: int) -> bytes:
        return struct.pack("=HBBI", 0x20, 0, 0, offset)

    def jump(code: int, value: int, skip: int) -> bytes:
        return struct.pack("=HBBI", code, 0, skip, value)

    def answer(value: int) -> bytes:
        return struct.pack("=HBBI", 0x06, 0, 0, value)

    equal, at_least, has_any = 0x15, 0x35, 0x45
    lines = [load(4), struct.pack("=HBBI", equal, 1, 0, audit), answer(_KILL), load(0)]
    # Numbers of x32, a second set of the same calls.
    lines += [jump(at_least, 0x40000000, 1), answer(_KILL)]
    lines += [jump(at_least, _UNKNOWN, 1), answer(_EPERM)]
    for number in refused:
        lines += [jump(equal, number, 1), answer(_EPERM)]
    for number, place in opening.items():
        # The arguments begin at byte 16, and their low halves come first.
        lines += [jump(equal, number, 4), load(16 + 8 * place)]
        lines += [jump(has_any, _TO_WRITE, 1), answer(_EPERM), answer(_ALLOW)]
    return b"".join([*lines, answer(_ALLOW)])


def _drop_privileges(libc: Any) -> None:
    """What root may do beyond others, to the clock for example, it may no longer, but read."""
    header = struct.pack("=Ii", _CAPABILITIES_VERSION, 0)
    held = ctypes.create_string_buffer(24)
    _call(libc.capget, header, held)
    permitted = struct.unpack("=6I", held.raw)[1] & _READ_ANY_FILE
    _call(libc.capset, header, struct.pack("=6I", permitted, permitted, 0, 0, 0, 0))


def _call(function: Any, *arguments: Any) -> int:
    # Plain integers would be passed as 32 bits.
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = function(*wide)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


if __name__ == "__main__":
    main()
