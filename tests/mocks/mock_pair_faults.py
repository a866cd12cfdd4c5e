"""Faults that MOCK workers of the pair have on request: which request, where in it, what."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

PrefillFault = Literal[
    "bad_json",
    "drop_after_grant",
    "drop_before_grant",
    "error_after_grant",
    "expired",
    "hang_after_grant",
    "hang_before_grant",
    "kill",
    "kill_after_answer",
    "malformed_blocks",
    "malformed_fields",
    "malformed_types",
    "no_blocks",
    "no_params",
    "slow",
    "status_500",
]
"""`kill_after_answer` strikes between the answer and the pull; `expired` grants a lease that has
nearly ended; the rest are what their names say."""

DecodeFault = Literal[
    "bad_event",
    "cut_event",
    "drop",
    "error_event",
    "ends_early",
    "handoff_timeout",
    "hang",
    "kill",
    "kv_load_failed",
    "lease_expired",
    "no_done",
    "no_finish",
    "no_usage",
    "preempted",
    "refuse_lease",
    "slow",
    "status_500",
]
"""`refuse_lease` answers with a status, `lease_expired` accepts the request and ends it with the
mark. `ends_early` ends the stream without finish reason and `[DONE]`, `no_finish` with `[DONE]`.
Those that have no meaning for an answer that is not streamed become `drop`."""

SILENT_FAULTS = frozenset({"hang", "hang_before_grant", "hang_after_grant"})

HARMLESS_FAULTS = frozenset({"slow", "no_done", "no_usage"})
"""The answer is complete and right all the same."""

PREFILL_FAULTS: tuple[PrefillFault, ...] = PrefillFault.__args__  # type: ignore[attr-defined]
DECODE_FAULTS: tuple[DecodeFault, ...] = DecodeFault.__args__  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class Fault:
    """One fault, used up by the request it strikes."""

    kind: PrefillFault | DecodeFault
    at: int = 0
    """Which generating request of the worker, counted from 0."""
    after: int = 0
    """Tokens a decode worker has sent when it strikes; -1 is before the response's head."""
    down_s: float | None = 0.5
    """How long a killed worker stays away; None is for ever."""
    fired_at: float | None = None
    """On the loop's clock."""
    call: str | None = None
    """The client's call whose request it struck."""


class FaultPlan:
    """The faults of one worker. A request meets at most one."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = list(faults)
        self._requests = 0

    def add(self, fault: Fault) -> None:
        """Let `fault` strike the worker's request number `fault.at` from now on."""
        fault.at += self._requests
        self.faults.append(fault)

    def next(self) -> Fault | None:
        """Count one generating request; the fault it is to meet, if any."""
        number, self._requests = self._requests, self._requests + 1
        return next((f for f in self.faults if f.at == number and f.fired_at is None), None)
