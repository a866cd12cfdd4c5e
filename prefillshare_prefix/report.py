"""What a session's calls shared, and each place where they stopped sharing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefillshare_prefix.causes import Break

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class CallRow:
    """One call of a session. Counts are tokens."""

    index: int
    role: str
    prompt_tokens: int
    shared_tokens: int
    """The prompt's beginning that an earlier call had as well."""
    lost_tokens: int = 0
    """What a break made this call compute again."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One break of one call. Counts are tokens."""

    call: int
    previous_call: int | None
    """The earlier call that this one stops going on from; None where nobody knows."""
    role: str
    broken: Break
    token_index: int | None
    """The first token that differs; None where nobody counted."""
    lost_tokens: int | None
    prompt_tokens: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON object; the break's fields are under `break`."""
        return {
            "call": self.call,
            "previous_call": self.previous_call,
            "role": self.role,
            "break": self.broken.to_dict(),
            "token_index": self.token_index,
            "lost_tokens": self.lost_tokens,
            "prompt_tokens": self.prompt_tokens,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The calls of one session and their breaks. `rich.print` shows it."""

    calls: int
    prompt_tokens: int
    shared_tokens: int
    findings: tuple[Finding, ...] = ()
    rows: tuple[CallRow, ...] = ()
    """One for each call, where they are known."""
    session: str | None = None
    fixed_tokens: int | None = None
    """What would be shared with every fix; None for the shared tokens and the lost ones."""
    estimated: bool = False
    """Whether the counts are estimates, made without the model's template and tokenizer."""

    @classmethod
    def of_calls(cls, data: Sequence[Mapping[str, Any]], session: str | None = None) -> Report:
        """The report of a running session, from what `GET /v1/sessions/{id}/calls` lists."""
        rows, findings = [], []
        for position, call in enumerate(data):
            index = _number(call.get("index"), position)
            role = str(call.get("role") or "")
            prompt = _number(call.get("prompt_tokens"))
            told = call.get("break")
            lost = _number(told.get("lost_tokens")) if isinstance(told, Mapping) else 0
            shared = _number(call.get("shared_tokens"))
            rows.append(CallRow(index, role, prompt, shared, lost))
            if isinstance(told, Mapping):
                at = told.get("token_index")
                found = Finding(index, None, role, Break.from_dict(told), at, lost, prompt)
                findings.append(found)
        return cls(
            calls=len(rows),
            prompt_tokens=sum(row.prompt_tokens for row in rows),
            shared_tokens=sum(row.shared_tokens for row in rows),
            findings=tuple(findings),
            rows=tuple(rows),
            session=session,
        )

    @property
    def lost_tokens(self) -> int:
        return sum(finding.lost_tokens or 0 for finding in self.findings)

    @property
    def breaks(self) -> int:
        """How many findings lose something; the others are tasks with nothing in common."""
        return sum(finding.broken.is_loss for finding in self.findings)

    @property
    def shared_ratio(self) -> float:
        """Shared part of all prompt tokens, 0 to 1."""
        return self.shared_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def fixed_ratio(self) -> float:
        """The shared part with every fix."""
        fixed = self.fixed_tokens
        if fixed is None:
            fixed = self.shared_tokens + self.lost_tokens
        return min(fixed / self.prompt_tokens, 1.0) if self.prompt_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "session": self.session,
            "calls": self.calls,
            "prompt_tokens": self.prompt_tokens,
            "shared_tokens": self.shared_tokens,
            "shared_ratio": round(self.shared_ratio, 4),
            "lost_tokens": self.lost_tokens,
            "fixed_ratio": round(self.fixed_ratio, 4),
            "estimated": self.estimated,
            "rows": [
                {
                    "call": row.index,
                    "role": row.role,
                    "prompt_tokens": row.prompt_tokens,
                    "shared_tokens": row.shared_tokens,
                    "lost_tokens": row.lost_tokens,
                }
                for row in self.rows
            ],
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def __rich__(self) -> RenderableType:
        # rich only where something is shown: the SDK imports this package.
        from prefillshare_prefix.report_table import shown

        return shown(self)


def _number(value: object, otherwise: int = 0) -> int:
    return value if isinstance(value, int) else otherwise
