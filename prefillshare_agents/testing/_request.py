"""A request as the fake server received it, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._ledger import Account


@dataclass(eq=False)
class Request:
    """One received request."""

    method: str
    path: str
    """As sent: quoted, with its query."""
    headers: tuple[tuple[str, str], ...]
    """Every header line; names in lower case."""
    body: Mapping[str, Any]
    session: str | None = None
    """The session the request belongs to, whichever spelling named it."""
    role: str | None = None
    status: int | None = None
    """HTTP status of the answer; None while there is none."""
    answered_at: float | None = None
    """`time.monotonic()` when the answer, or the last event of its stream, had been sent; None
    until then, and for a stream that was cut or whose reader left."""
    account: Account | None = field(default=None, repr=False)
    """A chat's counts in tokens, once it can be answered."""

    @property
    def sessions(self) -> list[str]:
        """The values of all X-Session-ID header lines: there should never be two."""
        return [value for name, value in self.headers if name == "x-session-id"]

    def header(self, name: str) -> str | None:
        """The first value of a header; None if it was not sent."""
        return next((value for key, value in self.headers if key == name.lower()), None)

    def answered(self) -> None:
        self.answered_at = time.monotonic()
