"""A pass-through on 127.0.0.1 that writes down the chat requests which go through it.

For programs that cannot be changed. Everything passes as it is: status codes, headers, bodies,
streams as they come, and an upstream that breaks off breaks off for the client too.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.lint.proxies import Proxy, proxy_for
from prefillshare_server.lint.running import is_base_url

CHAT = "/chat/completions"
_PIECE_BYTES = 65536
_SETTLE_S = 1.0
_KEPT_ANSWER_BYTES = 4 * 1024 * 1024
# Between two hops only (RFC 9110, section 7.6.1), or set anew by each of them.
_HOP = frozenset(
    {
        "connection",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


@contextmanager
def recording(upstream: str, trace: Path, *, timeout_s: float = 600) -> Iterator[str]:
    """Pass requests on to base URL `upstream`, and yield the base URL to send them to.

    Each chat request is appended to file `trace`, with the message it was answered with unless
    it was a stream. `timeout_s` bounds the silence of the upstream. Raises ConfigError.
    """
    target = _target(upstream)
    server = _Server(target, proxy_for(target), trace, timeout_s)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{target.path.rstrip('/')}"
    finally:
        server.shutdown()
        server.settle()
        server.server_close()
        thread.join()


def _target(upstream: str) -> SplitResult:
    if not is_base_url(upstream):
        raise ConfigError(
            Problem(f"--upstream {upstream}", "no base URL", "write http://HOST:PORT/v1")
        )
    return urlsplit(upstream)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, target: SplitResult, proxy: Proxy | None, trace: Path, timeout_s: float
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.proxy = proxy
        self.timeout_s = timeout_s
        self._trace = trace
        self._lock = threading.Lock()
        self._passing = 0
        self._open: set[socket.socket] = set()
        self._settled = threading.Condition(self._lock)
        self._tls = ssl.create_default_context() if target.scheme == "https" else None

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        with self._lock:
            self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """A client's idle connections must not hold up the end of the run."""
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def connect(self) -> HTTPConnection:
        host, port = self.target.hostname or "", self.target.port
        if self.proxy is not None:
            return self.proxy.connect(self.target, self._tls, self.timeout_s)
        if self._tls is not None:
            return HTTPSConnection(host, port, timeout=self.timeout_s, context=self._tls)
        return HTTPConnection(host, port, timeout=self.timeout_s)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """For as long as a request is passed on and written down."""
        with self._lock:
            self._passing += 1
        try:
            yield
        finally:
            with self._settled:
                self._passing -= 1
                self._settled.notify_all()

    def settle(self) -> None:
        """Wait, but not long, for requests whose client has its answer and may have ended."""
        with self._settled:
            self._settled.wait_for(lambda: not self._passing, _SETTLE_S)

    def write(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry, ensure_ascii=False) + "\n"
        with self._lock, self._trace.open("a", encoding="utf-8", errors="surrogatepass") as file:
            file.write(line)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error of the recorder."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_: object) -> None:
        """The terminal belongs to the program that runs."""

    def _pass(self) -> None:
        with self.server.passing():
            self._passed()

    def _passed(self) -> None:
        arrived = time.time()
        body = self._body()
        connection = self.server.connect()
        answer: bytes | None = None
        try:
            response = self._ask(connection, body)
            if isinstance(response, Exception):
                self._unreachable(response)
            else:
                answer = self._answer(response)
        finally:
            connection.close()
            # Also where the client has gone: it asked.
            self._record(arrived, body, answer)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = _pass

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _ask(self, connection: HTTPConnection, body: bytes) -> HTTPResponse | Exception:
        try:
            target, proxy = self.server.target, self.server.proxy
            host = target.netloc.rpartition("@")[2]
            through = proxy is not None and target.scheme == "http"
            place = f"http://{host}{self.path}" if through else self.path
            connection.putrequest(self.command, place, skip_host=True, skip_accept_encoding=True)
            connection.putheader("Host", host)
            if through and proxy is not None:
                for name, value in proxy.headers.items():
                    connection.putheader(name, value)
            for name, value in self.headers.items():
                if name.lower() not in _HOP and name.lower() != "content-length":
                    connection.putheader(name, value)
            if body or self.command in ("POST", "PUT", "PATCH"):
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            if connection.sock is not None:
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection.getresponse()
        except (OSError, HTTPException) as error:
            return error

    def _answer(self, response: HTTPResponse) -> bytes | None:
        """Pass a response on; its bytes if it came whole and is not too long to keep."""
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        empty = self.command == "HEAD" or response.status in (204, 304)
        chunked = not empty and response.getheader("Content-Length") is None
        if chunked and self.request_version == "HTTP/1.0":
            chunked, self.close_connection = False, True
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        kept = b""
        try:
            while not empty and (piece := response.read1(_PIECE_BYTES)):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
                if len(kept) <= _KEPT_ANSWER_BYTES:
                    kept += piece
        except (HTTPException, OSError):
            # Without the end of the body the client sees that it broke off, as it would alone.
            self.close_connection = True
            return None
        if response.length:
            self.close_connection = True
            return None
        if chunked:
            self.wfile.write(b"0\r\n\r\n")
        if response.status != 200 or len(kept) > _KEPT_ANSWER_BYTES:
            return None
        return _plain(kept, response.getheader("Content-Encoding"))

    def _unreachable(self, error: Exception) -> None:
        message = f"{self.server.target.geturl()} does not answer ({error or type(error).__name__})"
        body = {"message": message, "type": "server_error", "param": None, "code": "unreachable"}
        data = json.dumps({"error": body}).encode()
        self.send_response_only(504 if isinstance(error, TimeoutError) else 502)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _record(self, arrived: float, body: bytes, answer: bytes | None) -> None:
        path = self.path.partition("?")[0]
        if self.command != "POST" or not path.endswith(CHAT):
            return
        try:
            request = json.loads(body)
        except ValueError:
            return  # its server has refused it
        headers = {name.lower(): value for name, value in self.headers.items()}
        sessions = {k: v for k, v in headers.items() if k in _SESSION_HEADERS}
        entry = {"time": arrived, "method": "POST", "path": path, "headers": sessions}
        self.server.write({**entry, "body": request, "response": _parsed(answer)})


def _plain(data: bytes, encoding: str | None) -> bytes | None:
    """The bytes of an answer, unpacked; None in a form that is not known."""
    named = (encoding or "identity").strip().lower()
    if named == "identity":
        return data
    # 47: gzip and zlib alike. Some servers call a bare stream deflate.
    for bits in {"gzip": (47,), "x-gzip": (47,), "deflate": (47, -15)}.get(named, ()):
        try:
            return zlib.decompressobj(bits).decompress(data, _KEPT_ANSWER_BYTES)
        except zlib.error:
            continue
    return None


_SESSION_HEADERS = frozenset(
    {"x-session-id", "x-prefillshare-session", "x-session-affinity", "x-parent-session-id"}
)


def _parsed(answer: bytes | None) -> Any:
    try:
        return json.loads(answer) if answer else None
    except ValueError:
        return None  # a stream
