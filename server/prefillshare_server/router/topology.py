"""Which workers exist and where they listen."""

from dataclasses import dataclass
from typing import Literal

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """One running worker as the router sees it."""

    id: str
    """Opaque name shown to clients and in metrics, e.g. `prefill-0` or `planner-0`. Unique."""

    phase: Phase

    role: str | None
    """The role a decode worker serves; None for a prefill worker, which serves every role."""

    url: str
    """`http://host:port` without a trailing slash."""

    model: str
    """The served model name to put into requests to this worker."""

    block_size: int = 0
    """Tokens per KV block; 0 when not known."""

    block_bytes: int = 0
    """Bytes of one KV block over all layers; 0 when not known."""

    num_blocks: int = 0
    """KV blocks of this worker; 0 when not known."""
