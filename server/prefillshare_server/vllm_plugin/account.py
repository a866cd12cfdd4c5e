"""Where the prompt KV of one request on a decode worker came from."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Event = Literal["preempted", "kv_load_failed", "lease_expired"]

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
    """Prompt tokens the decoder itself ran: 1, more only when an answer is resumed."""

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
