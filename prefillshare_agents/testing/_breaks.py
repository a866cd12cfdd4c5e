"""A prefix break as the server tells it: in the answer, in a header, as a refusal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from prefillshare_prefix import Break

from ._errors import ApiError

HEADER = "X-PrefillShare-Break"
_HEADER_BYTES = 1024
_IN_HEADER = ("cause", "message_index", "token_index", "lost_tokens", "detail", "fix")


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """A context that does not go on from its session's."""

    why: Break
    token_index: int
    """Leading tokens it still shares with an earlier one."""
    lost_tokens: int
    """Tokens of the session's latest context behind that point."""

    def report(self) -> dict[str, Any]:
        """The field `break` of an answer."""
        counts = {"token_index": self.token_index, "lost_tokens": self.lost_tokens}
        return {**counts, **self.why.to_dict()}

    def header(self) -> str:
        """ASCII, so a long detail is cut short."""
        told = self.report()
        fields = {name: told[name] for name in _IN_HEADER}
        while len(value := json.dumps(fields)) > _HEADER_BYTES:
            fields["detail"] = fields["detail"][: len(fields["detail"]) // 2] + "…"
        return value

    def refusal(self) -> ApiError:
        return ApiError(
            422,
            f"the messages do not go on from this session's context after {self.token_index} "
            f"shared tokens: {self.why.detail}. {self.why.fix} (refused because of "
            "X-PrefillShare-Strict; nothing was computed)",
            code="prefix_break",
            param="messages",
            headers={HEADER: self.header(), "x-should-retry": "false"},
        )
