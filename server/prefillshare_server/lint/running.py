"""The calls of a running session, as its server counted them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from prefillshare_server.errors import ConfigError, Problem

TIMEOUT_S = 30


def calls(url: str, session: str) -> Sequence[Mapping[str, Any]]:
    """What `GET /v1/sessions/{id}/calls` of the server at base URL `url` lists.

    Raises ConfigError with what the server says, or that there is none.
    """
    if not is_base_url(url):
        raise ConfigError(Problem(f"--url {url}", "no base URL", "write http://HOST:PORT/v1"))
    base = url.rstrip("/").removesuffix("/v1")
    try:
        request = Request(f"{base}/v1/sessions/{quote(session, safe='')}/calls")
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            data = json.load(answer)["data"]
    except HTTPError as error:
        raise ConfigError(
            Problem(f"--session {session}", _said(error), "check the id: ended sessions are gone")
        ) from None
    except (URLError, OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            Problem(
                f"--url {url}", f"no router answers there ({error})", "start one, or correct it"
            )
        ) from None
    return [call for call in data if isinstance(call, Mapping)]


def is_base_url(url: str) -> bool:
    """Whether requests can be sent there."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises where it is no number
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _said(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"HTTP status {error.code}"
