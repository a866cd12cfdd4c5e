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
    decode_prompt_tokens_computed: int = 0
    """Prompt tokens the decode worker processed itself: the last one, by design."""
    affinity: str | None = None
    """`new` (first call), `hit` (same prefill worker as before), `rebound` (moved to another one)
    or `none` (a call without a session)."""
    prefill_worker: str | None = None
    decode_worker: str | None = None
    finish_reason: str | None = None
    prefix_break: Mapping[str, Any] | None = None
    """`{"token_index", "lost_tokens"}` where the prompt left the session's prefix, if it did: the
    leading tokens still shared, and the tokens of the session's latest context behind them."""
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
            decode_prompt_tokens_computed=extra.get("decode_prompt_tokens_computed") or 0,
            affinity=extra.get("affinity"),
            prefill_worker=extra.get("prefill_worker"),
            decode_worker=extra.get("decode_worker"),
            finish_reason=finish_reason,
            prefix_break=extra.get("break"),
            ttft_s=ttft_s,
            wall_s=wall_s,
        )


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleUsage:
    """Summed token and byte counts of some calls."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    handoff_bytes: int = 0
    completion_tokens: int = 0

    @classmethod
    def of(cls, calls: Iterable[CallRecord]) -> RoleUsage:
        calls = list(calls)
        summed = (item.name for item in fields(cls) if item.name != "calls")
        return cls(
            calls=len(calls),
            **{name: sum(getattr(call, name) for call in calls) for name in summed},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionUsage(RoleUsage):
    """A session's counts so far, in total and per role. `rich.print(usage)` shows a table."""

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
    """What one prefill per role would have computed: for each role its own first-seen tokens."""
