"""Which workers exist and where they listen."""

from dataclasses import dataclass
from typing import Literal

Phase = Literal["prefill", "decode", "colocated"]
"""What a worker does; `colocated` is both."""


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """One running worker as the router sees it."""

    id: str
    """Opaque name shown to clients and in metrics, e.g. `prefill-0` or `planner-0`. Unique."""

    phase: Phase

    pool: str | None
    """The workers it is one of: those of one role, by its name, or those that adapters share. None
    for a prefill worker that serves every role."""

    url: str
    """`http://host:port` without a trailing slash."""

    model: str
    """The name its own weights are served under."""

    block_size: int = 0
    """Tokens per KV block; 0 when not known."""

    block_bytes: int = 0
    """Bytes of one KV block over all layers; 0 when not known."""

    num_blocks: int = 0
    """KV blocks of this worker; 0 when not known."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Who speaks for a role."""

    pool: str
    """Which decode workers."""

    model: str
    """What they call its weights: the `model` of requests to them."""
