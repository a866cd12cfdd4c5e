"""What the server reports about calls and sessions, as typed values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One finished call of a session. Token and byte counts are the server's own figures."""

    role: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV the prefill worker already held."""
    computed_tokens: int
    """Prompt tokens the prefill worker had to compute."""
    handoff_bytes: int
    """KV moved from the prefill worker to the decode worker."""
    completion_tokens: int
    per_model_prefill_tokens: int | None = None
    """Prompt tokens that a prefill per role would have computed for this call, but for those that
    were cached before the session read them; None if the server does not say."""
    decode_prompt_tokens_computed: int = 0
    """Prompt tokens the decode worker processed itself: the last one, by design."""
    affinity: str | None = None
    """`new` (first call), `hit` (same prefill worker as before), `rebound` (moved to another one)
    or `none` (a call without a session)."""
    prefill_worker: str | None = None
    decode_worker: str | None = None
    finish_reason: str | None = None
    prefix_break: Mapping[str, Any] | None = None
    """Where and why the prompt left the session's prefix, if it did: `token_index` (leading tokens
    still shared), `lost_tokens` (of the session's latest context behind them), `cause`, `fix`."""
    ttft_s: float | None = None
    """Seconds from sending to the first generated text, at the client; None if not streamed."""
    wall_s: float

    @classmethod
    def of(
        cls,
        role: str,
        *,
        usage: Mapping[str, Any] | None,
        extra: Mapping[str, Any] | None,
        finish_reason: str | None,
        wall_s: float,
        ttft_s: float | None = None,
    ) -> CallRecord:
        """Build a record from a response's `usage` and top-level `prefillshare` objects.

        A server that sends no `prefillshare` object (any other OpenAI-compatible one) has its
        standard usage counted and nothing handed off.
        """
        usage, extra = usage or {}, extra or {}
        details = usage.get("prompt_tokens_details") or {}
        cached = _first(extra.get("cached_tokens"), details.get("cached_tokens"), 0)
        # The usage object can be missing: a client may ask for a stream without it.
        prompt = _first(usage.get("prompt_tokens"), cached + (extra.get("computed_tokens") or 0))
        return cls(
            role=role,
            prompt_tokens=prompt,
            cached_tokens=cached,
            computed_tokens=_first(extra.get("computed_tokens"), prompt - cached),
            handoff_bytes=extra.get("handoff_bytes") or 0,
            completion_tokens=usage.get("completion_tokens") or 0,
            per_model_prefill_tokens=extra.get("per_model_prefill_tokens"),
            decode_prompt_tokens_computed=extra.get("decode_prompt_tokens_computed") or 0,
            affinity=extra.get("affinity"),
            prefill_worker=extra.get("prefill_worker"),
            decode_worker=extra.get("decode_worker"),
            finish_reason=finish_reason,
            prefix_break=extra.get("break"),
            ttft_s=ttft_s,
            wall_s=wall_s,
        )

    @classmethod
    def of_answer(cls, role: str, answer: Mapping[str, Any], *, wall_s: float) -> CallRecord:
        """Build a record from the JSON object of an answer that was not streamed."""
        choices = answer.get("choices") or [{}]
        return cls.of(
            role,
            usage=answer.get("usage"),
            extra=answer.get("prefillshare"),
            finish_reason=choices[0].get("finish_reason"),
            wall_s=wall_s,
        )


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _counted(call: CallRecord, name: str) -> int:
    value: int | None = getattr(call, name)
    # A server that does not compare saved nothing that anyone knows of.
    return call.computed_tokens if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleUsage:
    """Summed token and byte counts of some calls."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    handoff_bytes: int = 0
    completion_tokens: int = 0
    per_model_prefill_tokens: int = 0
    """What a prefill per role would have computed for these calls, but for what was cached before
    the session read it."""

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that sharing spared: those of a prefill per role, less those computed.

        Only what this session computed and another role found again: a cache that other sessions
        have warmed saves nothing. Below 0 where calls left the session's prefix or its KV blocks
        were evicted.
        """
        return self.per_model_prefill_tokens - self.computed_tokens

    @classmethod
    def of(cls, calls: Iterable[CallRecord]) -> RoleUsage:
        calls = list(calls)
        summed = (item.name for item in fields(cls) if item.name != "calls")
        return cls(
            calls=len(calls),
            **{name: sum(_counted(call, name) for call in calls) for name in summed},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionUsage(RoleUsage):
    """A session's counts so far, in total and per role.

    `rich.print(usage)` shows a table, and so does a notebook.
    """

    roles: Mapping[str, RoleUsage] = field(default_factory=dict)

    @classmethod
    def of(cls, calls: Iterable[CallRecord]) -> SessionUsage:
        by_role: dict[str, list[CallRecord]] = {}
        for call in (calls := list(calls)):
            by_role.setdefault(call.role, []).append(call)
        total = RoleUsage.of(calls)
        return cls(
            **{item.name: getattr(total, item.name) for item in fields(total)},
            roles={role: RoleUsage.of(some) for role, some in by_role.items()},
        )

    def __rich__(self) -> Table:
        from ._table import usage_table

        return usage_table(self)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        return self.__rich__()._repr_mimebundle_(**{"include": [], "exclude": [], **options})


class SessionTotals(BaseModel):
    """The server's own ledger of a session (`GET /v1/sessions/{id}`), whichever client called."""

    model_config = ConfigDict(extra="allow", frozen=True)

    calls: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    handoff_bytes: int
    generated_tokens: int
    per_model_prefill_tokens: int
    """What one prefill per role would have computed: for each role its own first-seen tokens, but
    for those that were cached before the session read them."""
    prefills_ahead: int = 0
    """Prefills that were asked for before a call needed them."""


class PrefillAhead(BaseModel):
    """A prefill that a session asked for before its next call (`POST /v1/sessions/{id}/prefill`).

    The token counts are None unless the prefill was waited for.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    prefill_worker: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    computed_tokens: int | None = None
