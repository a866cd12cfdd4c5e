"""Everything a fake server knows: its settings, what it is told to answer, what it was sent."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from prefillshare_prefix import Layout

from ._http import Ending
from ._ledger import Ledger
from ._request import Request
from ._script import Failure, Script

_POLL_S = 0.05


class Stopped(ConnectionError):
    """The server ended while an answer was held: nobody gets it any more."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How the next stream breaks off."""

    after: int | None
    """Events that are sent before; None for all, without the end."""
    ending: Ending
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """Something that answers wait for."""

    event: threading.Event
    after: int | None
    role: str | None


@dataclass(eq=False)
class State:
    """Changed under `changed`, which is notified of every chat that arrives."""

    roles: frozenset[str] | None
    layout: Layout
    max_model_len: int
    strict_script: bool
    ledger: Ledger
    script: Script = field(default_factory=Script)
    failures: deque[Failure] = field(default_factory=deque)
    cuts: deque[Cut] = field(default_factory=deque)
    gates: list[Gate] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    chats: list[Request] = field(default_factory=list)
    unscripted: list[str] = field(default_factory=list)
    seen_roles: dict[str, None] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_at_gates(self, role: str, sent: int | None) -> None:
        """Wait until the gates are open for an answer of which `sent` events are out, or None.

        Raises Stopped if the server ends before.
        """
        for gate in list(self.gates):
            if gate.role in (None, role) and gate.after == sent:
                while not gate.event.wait(_POLL_S):
                    if self.stopping.is_set():
                        raise Stopped

    def wait_for(self, true: Callable[[], bool], timeout: float) -> bool:
        with self.changed:
            return self.changed.wait_for(true, timeout)
