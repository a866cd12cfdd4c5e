"""Prefix breaks, told once: found on the wire before sending, or by the server.

Only these two are trusted. What a program holds in its own structures need not be what it sends,
and only bytes that were sent, and the server's own verdict, say what can be shared.
"""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from prefillshare_prefix import Break, Cause, History

from ._errors import PrefixBreakError, PrefixBreakWarning

OnPrefixBreak = Literal["warn", "raise", "ignore"]

BREAK_HEADER = "x-prefillshare-break"
"""Response header with the server's verdict, as JSON."""
STRICT_HEADER = "X-PrefillShare-Strict"
"""Request header that lets the server refuse a break, before it computes anything."""

WATCHED_SESSIONS = 1024
KEPT_CONTEXTS = 64
"""Of one session, as many as the server keeps: more parallel branches than that may look edited."""


def check_policy(value: str) -> OnPrefixBreak:
    """Return `value`; raises ValueError if it is no policy."""
    if value not in ("warn", "raise", "ignore"):
        raise ValueError(f"on_prefix_break is {value!r}; give 'warn', 'raise' or 'ignore'")
    return value  # type: ignore[return-value]


@dataclass(slots=True)
class _Watched:
    """What was sent in one session by this process, and which causes were told."""

    history: History = field(default_factory=lambda: History(kept=KEPT_CONTEXTS))
    told: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


# For all clients of the process: a team's models each have a client of their own.
_sessions: OrderedDict[tuple[str, str], _Watched] = OrderedDict()
_lock = threading.Lock()


def before_sending(
    server: str, session_id: str, body: Mapping[str, Any], policy: OnPrefixBreak
) -> None:
    """Compare a chat request with what the session sent before.

    Raises PrefixBreakError if the policy is "raise".
    """
    if policy == "ignore":
        return
    watched = _watched(server, session_id)
    with watched.lock:
        found = watched.history.compare(body)
    if found is None or not found.is_loss:
        return
    if policy == "raise":
        raise PrefixBreakError(f"{_described(session_id, found)} The request was not sent.")
    if _is_new(watched, found.cause):
        _warn(_described(session_id, found))


def was_sent(server: str, session_id: str, body: Mapping[str, Any]) -> None:
    """Remember a chat request that the server accepted: what failed was not prefilled."""
    watched = _watched(server, session_id)
    with watched.lock:
        watched.history.keep(body)


def server_said(server: str, session_id: str, verdict: Any, policy: OnPrefixBreak) -> None:
    """Tell of a break that the server found, unless its cause was told for this session."""
    if policy == "ignore" or not isinstance(verdict, Mapping):
        return
    cause = str(verdict.get("cause", "unknown"))
    if _is_loss(cause) and _is_new(_watched(server, session_id), cause):
        _warn(
            f"session {session_id!r}: the server found that the prompt leaves the session's "
            f"prefix at token {verdict.get('token_index')} ({cause}); {verdict.get('lost_tokens')} "
            f"tokens are prefilled again. {verdict.get('detail') or ''} {verdict.get('fix') or ''}"
        )


def forget(session_id: str, but: Sequence[Mapping[str, Any]] = ()) -> None:
    """Take back what was sent in a session that has ended, or went back to the messages `but`."""
    with _lock:
        found = [watched for key, watched in _sessions.items() if key[1] == session_id]
    for watched in found:
        with watched.lock:
            watched.history.forget({"messages": list(but)} if but else None)


def _is_loss(cause: str) -> bool:
    try:
        return Cause(cause).is_loss
    except ValueError:  # of a newer server
        return True


def _is_new(watched: _Watched, cause: str) -> bool:
    """Whether `cause` is told for the first time, which it now is."""
    with watched.lock:
        before = len(watched.told)
        watched.told.add(cause)
        return len(watched.told) > before


def verdict_in(headers: Mapping[str, str]) -> Any:
    """Return the server's verdict in response headers, or None."""
    value = headers.get(BREAK_HEADER)
    try:
        return json.loads(value) if value else None
    except ValueError:
        return None


def _watched(server: str, session_id: str) -> _Watched:
    key = (server, session_id)
    with _lock:
        watched = _sessions.setdefault(key, _Watched())
        _sessions.move_to_end(key)
        while len(_sessions) > WATCHED_SESSIONS:
            _sessions.popitem(last=False)
        return watched


def _described(session_id: str, found: Break) -> str:
    return (
        f"session {session_id!r}: the request does not extend what was sent before "
        f"({found.cause}). {found.words} {found.detail} {found.fix}"
    )


def _warn(text: str) -> None:
    # Above the frames of this package and of openai, where the caller's own line is.
    warnings.warn(text.rstrip(), PrefixBreakWarning, stacklevel=_frames_to_caller())


def _frames_to_caller() -> int:
    """The `stacklevel` of the first frame outside of this package and those it extends."""
    level, frame = 1, sys._getframe(1)
    inside = ("prefillshare_agents.", "openai.", "langchain_openai.", "langchain_core.")
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(inside):
        frame = frame.f_back
        level += 1
    return level
