"""The handoff of base KV from a prefill worker to one reader, and when a reader must refuse it.

Refusing is the only safe answer: vLLM's own fallbacks compute the missing KV with the decoder's
weights and answer 200 with different logits.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

import msgspec

from prefillshare_server.vllm_plugin.account import PARAMS_KEY
from prefillshare_server.vllm_plugin.contract import BaseContract


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Fingerprint of a token sequence: 16 hex digits."""
    return hashlib.sha256(array("I", token_ids).tobytes()).hexdigest()[:16]


def lease_margin_s(lease_s: float) -> float:
    """Seconds that must be left to read when a decode worker accepts a handoff.

    That is for the pull, which must end within the lease; and for vLLM, which renews the leases of
    requests that queue with heartbeats a sixth of the lease apart, after a handshake. Renewal only
    keeps the prefill worker from giving up blocks that are still wanted: no deadline counts on it.
    """
    return lease_s // 6 + 1


class Handoff(msgspec.Struct, frozen=True):
    """What a prefill worker adds to vLLM's `kv_transfer_params`, under "prefillshare"."""

    base_len: Annotated[int, msgspec.Meta(ge=1)]
    """Prompt tokens the base processed; KV of the first base_len - 1 may be read."""

    base_fingerprint: str

    expires_at: float
    """Unix seconds; afterwards the prefill worker may give the blocks to another request."""

    prompt_digest: str
    """`prompt_digest` of those base_len tokens."""

    def to_params(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)

    def readable_s(self, now: float, clock_skew_s: float) -> float:
        """Seconds from Unix time `now`, by a decode worker's clock, in which reading is safe.

        Each worker's clock may be `clock_skew_s` off the router's, which sends no calls to one
        that is further off: so it may be twice as much later at the prefill worker.
        """
        return self.expires_at - 2 * clock_skew_s - now


GeneratedIds = list[Annotated[int, msgspec.Meta(ge=0)]]


class Reading(Handoff, frozen=True):
    """The handoff as a decode worker reads it."""

    generated_ids: GeneratedIds = []
    """The answer so far, which another worker generated: this one continues it."""


class _SoFar(msgspec.Struct, frozen=True):
    """All that an engine without handoffs reads of it."""

    generated_ids: GeneratedIds = []


class ReadableParams(msgspec.Struct, frozen=True):
    """`kv_transfer_params` that a decode worker can read from: vLLM's fields and ours.

    Unknown fields are vLLM's business.
    """

    do_remote_prefill: bool
    remote_block_ids: Annotated[list[list[int]], msgspec.Meta(min_length=1, max_length=1)]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    prefillshare: Reading

    @classmethod
    def of(cls, params: object) -> "ReadableParams | None":
        """Parse a request's `kv_transfer_params`; None when there is nothing to read."""
        try:
            parsed = msgspec.convert(params, cls)
        except msgspec.ValidationError:
            return None
        return parsed if parsed.do_remote_prefill else None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a decode worker does not serve a request."""

    code: str
    message: str
    status: HTTPStatus = HTTPStatus.BAD_REQUEST

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed after a new prefill."""
        return self.status is HTTPStatus.SERVICE_UNAVAILABLE


@dataclass(frozen=True, slots=True)
class Rules:
    """What a decode worker asks of a handoff, whatever the prompt."""

    base_fingerprint: str
    lease_s: float
    clock_skew_s: float
    """How far each worker's clock may be off the router's."""

    vocabulary: int
    """Token ids are below this."""

    @classmethod
    def of_worker(cls, vllm_config: Any) -> "Rules":
        extra = vllm_config.kv_transfer_config.get_from_extra_config
        return cls(
            base_fingerprint=BaseContract.of_worker(vllm_config).fingerprint,
            lease_s=float(extra("kv_lease_duration", 30)),
            clock_skew_s=float(extra("clock_skew_s", 1.0)),
            vocabulary=vllm_config.model_config.get_vocab_size(),
        )

    def refusal(self, params: ReadableParams | None, now: float) -> Refusal | None:
        """None means that the handoff may be read at Unix time `now`."""
        if params is None:
            return Refusal(
                "base_kv_missing",
                "A decode worker serves only requests that bring the base's KV of their prompt "
                "(kv_transfer_params of a prefill worker with do_remote_prefill). "
                "Send the request to the router.",
            )
        reading = params.prefillshare
        if reading.base_fingerprint != self.base_fingerprint:
            return Refusal(
                "base_kv_mismatch",
                f"The request brings KV of base {reading.base_fingerprint}, this decode worker "
                f"reads base {self.base_fingerprint}. Prefill the prompt on a prefill worker of "
                "the same cluster.",
            )
        if refused := beyond_vocabulary(reading.generated_ids, self.vocabulary):
            return refused
        margin_s = lease_margin_s(self.lease_s)
        if reading.readable_s(now, self.clock_skew_s) < margin_s:
            return Refusal(
                "lease_expired",
                "The lease on the request's base KV ended or ends within "
                f"{margin_s + 2 * self.clock_skew_s:g} s. "
                "Prefill the prompt again and retry.",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )
        return None


def prompt_refusal(
    params: ReadableParams, prompt_ids: Sequence[int], block_size: int
) -> Refusal | None:
    """Check the handoff against the prompt it is for: same tokens, as many blocks as they need."""
    handoff, blocks = params.prefillshare, len(params.remote_block_ids[0])
    if handoff.base_len != len(prompt_ids):
        return Refusal(
            "prompt_mismatch",
            f"The base processed {handoff.base_len} tokens, the prompt has {len(prompt_ids)}. "
            "An answer so far belongs in generated_ids, not in the prompt.",
        )
    if prompt_digest(prompt_ids) != handoff.prompt_digest:
        return Refusal(
            "prompt_mismatch",
            "The prompt's tokens are not the ones the base processed. "
            "Send the prefill worker's tokens in kv_transfer_params.prompt_token_ids.",
        )
    if blocks != -(-handoff.base_len // block_size):
        return Refusal(
            "prompt_mismatch",
            f"{blocks} KV blocks are not what {handoff.base_len} tokens need "
            f"(block size {block_size}).",
        )
    return None


def generated_ids(sampling_params: Any) -> list[int]:
    """The answer so far that a request brings in vLLM's sampling parameters; mostly empty.

    Unlike `ReadableParams.of` it also finds it once the handoff has been taken.
    """
    extra: dict[str, Any] = getattr(sampling_params, "extra_args", None) or {}
    return answer_so_far(extra.get("kv_transfer_params"))


def answer_so_far(params: Any) -> list[int]:
    """The same, in `kv_transfer_params`."""
    try:
        return msgspec.convert((params or {}).get(PARAMS_KEY), _SoFar).generated_ids
    except (msgspec.ValidationError, AttributeError):
        return []


def beyond_vocabulary(token_ids: Sequence[int], vocabulary: int) -> Refusal | None:
    """vLLM checks prompts only; its engine dies of an id that does not exist."""
    if all(token < vocabulary for token in token_ids):
        return None
    return Refusal("generated_ids_invalid", f"generated_ids has ids beyond {vocabulary - 1}.")


class Deadlines:
    """Requests whose base KV is not here yet, and when it is too late for it.

    Times are seconds of one clock, whichever.
    """

    def __init__(self) -> None:
        self._deadlines: dict[str, float] = {}

    def set(self, request_id: str, deadline: float) -> None:
        self._deadlines[request_id] = deadline

    def drop(self, request_id: str) -> None:
        """Forget the request, if it is known: it ended, or waits for nothing."""
        self._deadlines.pop(request_id, None)

    def came(self, request_id: str, now: float) -> None:
        """The base KV came. Too late, the request stays overdue: who knows what was read."""
        if now <= self._deadlines.get(request_id, now):
            self.drop(request_id)

    def overdue(self, now: float) -> list[str]:
        return [request_id for request_id, end in self._deadlines.items() if end < now]


class SingleUse:
    """Remembers which handoffs were taken: one handoff feeds exactly one reader.

    The prefill worker frees the blocks as soon as one request has read them; a second reader of
    the same handoff would read whatever is there by then. Entries are dropped when the lease ends,
    because an expired handoff is refused anyway.
    """

    def __init__(self) -> None:
        self._expiry: dict[str, float] = {}

    def take(self, remote_request_id: str, expires_at: float, now: float) -> Refusal | None:
        """Mark the handoff as taken; a refusal if it was taken before."""
        while self._expiry and (oldest := next(iter(self._expiry))) != remote_request_id:
            if self._expiry[oldest] > now:
                break
            del self._expiry[oldest]
        if remote_request_id in self._expiry:
            return Refusal(
                "handoff_taken",
                f"The base KV of prefill request {remote_request_id} was read before; it feeds "
                "one request (n=1). Prefill again for each further answer.",
            )
        self._expiry[remote_request_id] = expires_at
        return None
