"""Session ids: what a valid one looks like, how a fresh one and a derived one are made."""

import hashlib
import uuid
from collections.abc import Mapping

SESSION_HEADER = "X-Session-ID"
"""The header every tagged request carries; the server pins one prefill worker to its value."""

PARENT_HEADER = "X-Parent-Session-ID"
"""The header by which a fork starts on the prefill worker that holds what it shares."""

_SESSION_HEADERS = frozenset({"x-session-id", "x-prefillshare-session", "x-session-affinity"})
_MAX_LENGTH = 255


def check_session_id(value: str) -> str:
    """Return `value` unchanged if it can be a session id: 1–255 printable ASCII characters.

    Raises ValueError otherwise: such an id would be refused, or silently cut, on the way.
    """
    if not 0 < len(value) <= _MAX_LENGTH:
        raise ValueError(
            f"session id has {len(value)} characters; give 1 to {_MAX_LENGTH} "
            "(hash longer names, for example with hashlib.sha256)"
        )
    if not (value.isascii() and value.isprintable()) or value != value.strip():
        raise ValueError(
            f"session id {value!r} is not plain printable ASCII without outer blanks; "
            "a header cannot carry it"
        )
    return value


def new_session_id() -> str:
    """Return an unguessable id: whoever knows a session's id can add to that session."""
    return uuid.uuid4().hex


def session_id_of_thread(thread_id: object) -> str:
    """Return the session id of a LangGraph thread: the same thread always gives the same id.

    Hashed, because thread ids may hold names or e-mail addresses and any number of characters.
    """
    return hashlib.sha256(str(thread_id).encode()).hexdigest()


def names_session(headers: Mapping[str, object]) -> bool:
    """Return whether `headers` settle the session themselves, by a value or by `openai.Omit()`.

    Compared without case: dictionaries distinguish `x-session-id` from `X-Session-ID`, HTTP
    does not, and two spellings in one request would leave the winner to chance.
    """
    return any(name.lower() in _SESSION_HEADERS for name in headers)


def session_named_in(headers: Mapping[str, object]) -> str | None:
    """Return the session id that `headers` name; None if they name none or say `Omit()`."""
    named = (value for name, value in headers.items() if name.lower() in _SESSION_HEADERS)
    return next((value for value in named if isinstance(value, str)), None)


def parent_named_in(headers: Mapping[str, object]) -> str | None:
    """Return the id of the parent session that `headers` name, or None."""
    named = (value for name, value in headers.items() if name.lower() == PARENT_HEADER.lower())
    return next((value for value in named if isinstance(value, str)), None)
