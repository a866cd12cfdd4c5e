"""Where the prompt KV of one request on a worker came from, and the totals of all requests."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Event = Literal["preempted", "kv_load_failed", "lease_expired", "handoff_timeout"]

PARAMS_KEY = "prefillshare"
"""Key of our fields in `kv_transfer_params`, in both directions."""

REFUSED_KEY = "refused"
"""In the engine's last output, instead of an account: why it refused the request."""


@dataclass(slots=True)
class Account:
    """Counts of tokens and bytes; filled by the scheduler while the request runs."""

    base_tokens_received: int = 0
    """Prompt tokens whose base KV was pulled from the prefill worker."""

    base_tokens_reused: int = 0
    """Prompt tokens whose base KV was in this worker's prefix cache."""

    prompt_tokens_computed: int = 0
    """Prompt positions this worker itself ran: 1 on a decode worker."""

    generated_tokens_recomputed: int = 0
    """Tokens of a resumed answer, generated elsewhere before, that the decoder ran again."""

    handoff_bytes: int = 0

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
class Totals:
    """Sums over every request of a worker that ended, however it ended."""

    base_tokens_received: int = 0
    base_tokens_reused: int = 0
    prompt_tokens_computed: int = 0
    generated_tokens_recomputed: int = 0
    handoff_bytes: int = 0
    events: dict[Event, int] = field(default_factory=lambda: dict.fromkeys(get_args(Event), 0))

    def add(self, account: Account) -> None:
        """Add a request's counts; its event is counted by whoever ended it early."""
        self.base_tokens_received += account.base_tokens_received
        self.base_tokens_reused += account.base_tokens_reused
        self.prompt_tokens_computed += account.prompt_tokens_computed
        self.generated_tokens_recomputed += account.generated_tokens_recomputed
        self.handoff_bytes += account.handoff_bytes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
