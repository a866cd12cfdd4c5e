"""Which session a request belongs to, in any of the spellings clients use."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefillshare_server.router.errors import bad_request

MAX_LENGTH = 255

_SPELLINGS = (
    ("header", "x-session-id"),
    ("header", "x-prefillshare-session"),
    ("body", "session_id"),
    ("header", "x-session-affinity"),
    ("body", "prompt_cache_key"),
    ("body", "metadata.session_id"),
)
"""In order of precedence. `user` and request ids are left out on purpose: they name another thing
and would merge or scatter sessions."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose context a call continues. Everything is what the client sent, never made up."""

    session: str | None
    parent: str | None
    """A session whose prefill worker a new session starts on."""
    final: bool
    """The session ends with this call."""


def identify(headers: Mapping[str, str], body: Mapping[str, Any]) -> Identity:
    """Read the identity of a request. `headers` is case-insensitive or lower-case.

    Raises RouterError(400) for an id that is not 1 to 255 printable ASCII characters.
    """
    metadata = body.get("metadata")
    fields = {
        "session_id": body.get("session_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "metadata.session_id": metadata.get("session_id")
        if isinstance(metadata, Mapping)
        else None,
    }
    session = None
    for place, name in _SPELLINGS:
        found = headers.get(name) if place == "header" else fields[name]
        if found is not None and found != "":
            session = checked(found, name)
            break
    parent = headers.get("x-parent-session-id") or None
    return Identity(
        session=session,
        parent=None if parent is None else checked(parent, "x-parent-session-id"),
        final=headers.get("x-session-final", "").strip().lower() in ("true", "1"),
    )


def checked(value: object, name: str) -> str:
    """Return `value` if it is a valid session id; raise RouterError(400) naming `name` if not."""
    if not isinstance(value, str):
        raise bad_request(f"{name} must be a string, not {type(value).__name__}", name)
    if not 0 < len(value) <= MAX_LENGTH:
        raise bad_request(
            f"{name} has {len(value)} characters; a session id has 1 to {MAX_LENGTH} "
            "(hash longer names)",
            name,
        )
    if not (value.isascii() and value.isprintable()):
        raise bad_request(f"{name} is not printable ASCII: {value!r}", name)
    return value
