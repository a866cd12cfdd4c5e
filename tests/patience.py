"""The router's limits that no setting moves: on a busy machine none of them may run out."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

LIMITS = (
    "app._PROBE_S",
    "decode._ACCOUNT_S",
    "health._PROBE_S",
    "leases._RELEASE_S",
    "workers.CONNECT_S",
)
"""For how long the router waits, in seconds."""

INTERVALS = ("app._SWEEP_S", "health._CHECK_S")
"""How often it looks by itself, in seconds."""


@contextmanager
def patient(limit_s: float, *more: str) -> Iterator[None]:
    """Inside the block the limits, and the `more` that are named, are as long as that."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (*LIMITS, *more):
            patch.setattr(f"prefillshare_server.router.{name}", limit_s)
        yield
