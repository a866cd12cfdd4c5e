"""The proxy that the environment names for an upstream, as the program's clients would take it."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPSConnection
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from prefillshare_server.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Proxy:
    """A forward proxy that is spoken to over plain HTTP."""

    host: str
    port: int
    headers: Mapping[str, str] = field(default_factory=dict)
    """What it wants to see: who asks, if its URL says so."""

    def connect(
        self, target: SplitResult, tls: ssl.SSLContext | None, timeout_s: float
    ) -> HTTPConnection:
        """A connection to it; for https a tunnel through it."""
        if tls is None:
            return HTTPConnection(self.host, self.port, timeout=timeout_s)
        tunnel = HTTPSConnection(self.host, self.port, timeout=timeout_s, context=tls)
        tunnel.set_tunnel(target.hostname or "", target.port or 443, dict(self.headers))
        return tunnel


def proxy_for(target: SplitResult) -> Proxy | None:
    """What HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY say of `target`.

    Raises ConfigError for a proxy of another kind, such as socks.
    """
    named = getproxies()
    url = named.get(target.scheme) or named.get("all")
    host = target.hostname or ""
    if not url or proxy_bypass(f"{host}:{target.port}" if target.port else host):
        return None
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or 80
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(
            Problem(
                f"{target.scheme}_proxy {url}",
                "no proxy that the recorder can speak to",
                "name an http:// one, or put the upstream's host into NO_PROXY",
            )
        )
    headers = {}
    if parts.username is not None:
        who = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(who.encode()).decode()}"
    return Proxy(parts.hostname, port, headers)
