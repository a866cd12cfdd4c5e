"""Where the prompt KV of one request on a worker came from, and the totals of all requests."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

Event = Literal["preempted", "kv_load_failed", "lease_expired", "handoff_timeout"]

PARAMS_KEY = "prefillshare"
"""Key of our fields in `kv_transfer_params`, in both directions."""

EVENT_MARK = f"{PARAMS_KEY}:"
"""In front of the event, as the stop_reason of a request that was ended early."""

REFUSED_KEY = "refused"
"""In the engine's last output, instead of an account: why it refused the request."""


@dataclass(slots=True)
class Counts:
    """Tokens and bytes."""

    base_tokens_received: int = 0
    """Prompt tokens whose base KV was pulled from the prefill worker."""

    base_tokens_reused: int = 0
    """Prompt tokens whose base KV was in this worker's prefix cache."""

    base_tokens_computed: int = 0
    """Prompt tokens that this worker ran with the base's weights, for a decoder of its own."""

    prompt_tokens_computed: int = 0
    """Prompt tokens run for this worker's own purpose: by a decoder 1 per request, the last."""

    generated_tokens_recomputed: int = 0
    """Tokens of a resumed answer, generated elsewhere before, that the decoder ran again."""

    handoff_bytes: int = 0

    def add(self, counts: "Counts") -> None:
        """Add what `counts` has to the same fields here."""
        for each in fields(Counts):
            setattr(self, each.name, getattr(self, each.name) + getattr(counts, each.name))


@dataclass(slots=True)
class Account(Counts):
    """Of one request; filled by the scheduler while it runs."""

    event: Event | None = None
    """Why the request ended early; None when it did not."""

    @property
    def base_tokens(self) -> int:
        """Leading prompt tokens whose KV is the base's: all that may enter the prefix cache."""
        return self.base_tokens_received + self.base_tokens_reused

    def to_params(self) -> dict[str, Any]:
        """As `kv_transfer_params` of the engine's last output for the request."""
        return {PARAMS_KEY: asdict(self)}


@dataclass(slots=True)
class Totals(Counts):
    """Sums over every request of a worker that ended, however it ended."""

    events: dict[Event, int] = field(default_factory=lambda: dict.fromkeys(get_args(Event), 0))
    """Counted by whoever ends a request early."""
