"""From a prefilled prompt to the one sequence that is decoded from it."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefillshare_server.router.breaks import PrefixBreak
from prefillshare_server.router.ledger import Piece
from prefillshare_server.router.placement import Placed, Reserved
from prefillshare_server.router.topology import WorkerEndpoint


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids: what the session shares, then what only this call needs."""

    ids: Sequence[int]
    context_tokens: int
    """Leading ids that the session's next prompts repeat; the rest is the role's own tail."""
    kept: Piece | None = None
    """The part of the context the ledger had already."""
    new_text: str | None = None
    """The context behind it; None where the client sent no messages."""
    opener: tuple[str, Sequence[int]] = ("", ())
    """The generation prompt: the next context repeats it in front of the answer."""
    broken: PrefixBreak | None = None

    @property
    def kept_tokens(self) -> int:
        """Tokens the session sent to prefill, or generated, before."""
        return self.kept.tokens if self.kept else 0

    @property
    def context_ids(self) -> Sequence[int]:
        """Ids of the context."""
        return self.ids[: self.context_tokens]

    @property
    def tail_ids(self) -> Sequence[int]:
        """Ids of instructions, tools and generation prompt."""
        return self.ids[self.context_tokens :]


@dataclass(frozen=True, slots=True)
class Computed:
    """What a prefill ahead of any call did, in tokens."""

    worker: WorkerEndpoint
    cached_tokens: int
    computed_tokens: int


@dataclass(slots=True, eq=False)
class Reader:
    """One sequence to decode: one of the n choices for one prompt."""

    index: int
    """Of the choice in the client's answer."""
    choice: int
    """Of the choice among those for the same prompt."""
    prompt: Prompt
    place: Reserved
    """Room on a decode worker; changes when the answer is resumed elsewhere."""

    @property
    def worker(self) -> WorkerEndpoint:
        """The decode worker that reads for it now."""
        return self.place.worker


@dataclass(frozen=True, slots=True)
class WorkerAccount:
    """A decode worker's account of one attempt; None where it gave none."""

    base_tokens_received: int | None = None
    base_tokens_reused: int | None = None
    base_tokens_computed: int | None = None
    prompt_tokens_computed: int | None = None
    generated_tokens_recomputed: int | None = None
    handoff_bytes: int | None = None
    event: str | None = None


@dataclass(slots=True, eq=False)
class Handoff:
    """KV of a prompt for exactly one request to a decode worker: leased on a prefill worker, or
    there already where one engine does both."""

    reader: Reader
    placed: Placed
    params: Mapping[str, Any]
    """`kv_transfer_params` of the prefill worker's answer."""
    cached_tokens: int | None
    """Prompt tokens that were found in the prefix cache; None until a colocated engine says so."""
    computed_tokens: int | None = None
    """Prompt tokens that were computed; None as above, and for a prefill worker all others."""
    worker: WorkerEndpoint = field(init=False)
    """The decode worker it is for; the reader may move on to another."""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """X-Request-Id of this attempt at both workers. Fresh, since workers want unique ids."""
    context_end: Piece | None = None
    """Where the ledger keeps the context."""
    taken: bool = False
    """It was sent to the decode worker, which may read it."""
    over: bool = False
    """The decode worker ended the call, or the lease was given back: nothing is left to do."""
    lost: bool = False
    """That worker did not end the request itself."""
    unreadable: bool = False
    """The decode worker could not read the KV from the prefill worker."""
    account: WorkerAccount | None = None
    """Set once it was asked for, since a worker tells it only once."""
    later: list["Handoff"] = field(default_factory=list)
    """Handoffs of the same prompt that followed to resume the answer, in order."""

    def __post_init__(self) -> None:
        self.worker = self.reader.worker
        if self.cached_tokens is not None:
            self.computed_tokens = len(self.reader.prompt.ids) - self.cached_tokens
