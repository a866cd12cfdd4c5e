"""Free TCP ports on the loopback interface."""

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20_000


def free_ports(count: int) -> list[int]:
    """`count` distinct ports that are free now.

    They lie below the range from which the kernel gives ports to outgoing connections: such a
    connection would otherwise take a port in the seconds until the worker binds it. Another
    program may still do so: a start that fails with "address already in use" is repeated with new
    ports.
    """
    candidates = list(range(_LOWEST, _first_ephemeral()))
    random.shuffle(candidates)
    free: list[int] = []
    with ExitStack() as stack:
        for port in candidates:
            if len(free) == count:
                break
            probe = stack.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind((LOOPBACK, port))
                free.append(port)
    if len(free) < count:
        raise OSError(f"found {len(free)} of {count} free ports from {_LOWEST} up")
    return free


def _first_ephemeral() -> int:
    """Start of the kernel's range for outgoing connections; 32768 where it is not told."""
    with suppress(OSError, ValueError):
        first = int(_EPHEMERAL_RANGE.read_text().split()[0])
        # A machine may be set to use nearly all ports; then no port is safer than another.
        return first if first > _LOWEST + 1000 else 65_536
    return 32_768
