"""Prefix breaks: where a session's prompts stop sharing their beginning, and why.

Used by the SDK, which sees the requests, by the server, which sees the tokens, and by
`prefillshare lint`. Standard library only.
"""

from prefillshare_prefix.causes import Break, Cause, Layout
from prefillshare_prefix.compare import find_break
from prefillshare_prefix.history import History
from prefillshare_prefix.report import CallRow, Finding, Report
from prefillshare_prefix.texts import text_break

__all__ = [
    "Break",
    "CallRow",
    "Cause",
    "Finding",
    "History",
    "Layout",
    "Report",
    "find_break",
    "text_break",
]
