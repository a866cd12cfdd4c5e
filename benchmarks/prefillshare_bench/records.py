"""What a run leaves of each call, as the client saw it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

REFUSED = 429
"""What a server says that takes no more sessions."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call. Times are seconds since the first session arrived."""

    session: str
    index: int
    role: str
    arrived_s: float
    """When the call was wanted: its session's arrival, or the end of the call before it."""
    sent_s: float
    """When it was sent: later only where the client itself keeps sessions waiting."""
    first_s: float | None
    """When the first token came."""
    last_s: float
    """When the last token came, or the call failed."""
    itl_ms: Sequence[float]
    """Between tokens, one less than there are; the time to a chunk of several is spread evenly."""
    prompt_tokens: int | None
    cached_tokens: int | None
    computed_tokens: int | None
    generated: int
    handoff_bytes: int | None
    prefill_worker: str | None
    decode_worker: str | None
    status: int
    """Of HTTP; 0 if nothing was answered."""
    error: str | None = None
    ids: Sequence[int] | None = None
    """What was generated, if the server tells."""

    @property
    def ok(self) -> bool:
        """Whether the whole answer came."""
        return self.status == 200 and self.error is None

    @property
    def latency_s(self) -> float:
        """From when the call was wanted to its last token."""
        return self.last_s - self.arrived_s

    @property
    def ttft_s(self) -> float | None:
        """From when the call was wanted to its first token."""
        return None if self.first_s is None else self.first_s - self.arrived_s

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per token behind the first one; None if there is none."""
        if self.first_s is None or self.generated < 2:
            return None
        return 1000 * (self.last_s - self.first_s) / (self.generated - 1)


@dataclass(frozen=True)
class Replay:
    """A workload that was run once."""

    calls: Sequence[CallRecord]
    """In the order in which they ended."""
    wall_s: float
    """From the first session's arrival to the end of the last call."""

    def sessions(self) -> dict[str, list[CallRecord]]:
        """Calls by session, in the order they were made."""
        found: dict[str, list[CallRecord]] = {}
        for call in self.calls:
            found.setdefault(call.session, []).append(call)
        return {name: sorted(calls, key=lambda call: call.index) for name, calls in found.items()}
