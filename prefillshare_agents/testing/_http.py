"""A small HTTP server on 127.0.0.1 that stops at once, whatever its clients are doing."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, Literal

from ._request import Request

_STOP_S = 5.0

Ending = Literal["done", "end", "reset"]
"""How a stream ends: with `[DONE]`, without it, or with the connection closed under it."""


@dataclass(frozen=True, slots=True)
class Json:
    """A whole answer."""

    body: Mapping[str, Any]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Events:
    """A streamed answer."""

    events: Iterable[Mapping[str, Any]]
    headers: Mapping[str, str]
    ending: Ending = "done"


Respond = Callable[[Request, bytes], Json | Events]


class HttpServer:
    """Serves `respond` from threads until it is stopped."""

    def __init__(self, respond: Respond) -> None:
        self._http = _Server(respond)
        self._thread = threading.Thread(target=self._serve, name="prefillshare-fake", daemon=True)
        self._stopping = threading.Event()
        self.port: int = self._http.server_address[1]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End every connection and thread; once is enough."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if not self._thread.is_alive():
            self._http.server_close()
            return
        # Wakes the thread that waits for a connection.
        socket.create_connection(("127.0.0.1", self.port), timeout=_STOP_S).close()
        self._thread.join(_STOP_S)
        self._http.server_close()
        self._http.disconnect()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            self._http.handle_request()


class _Server(ThreadingTCPServer):
    # Not HTTPServer, which looks up the host's name: that can take seconds.
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, respond: Respond) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.respond = respond
        self._open: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), daemon=True
        )
        # Not by the thread itself: it may be late, and `disconnect` has to find all.
        with self._lock:
            self._open[request] = thread
        thread.start()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def disconnect(self) -> None:
        with self._lock:
            threads = list(self._open.values())
            for connection in self._open:
                with suppress(OSError):  # The client was faster.
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(_STOP_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that closes a stream early is no error of the test."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "prefillshare-fake"
    wbufsize = -1  # Head and body leave in one packet.
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""

    def _handle(self) -> None:
        headers = tuple((name.lower(), value) for name, value in self.headers.items())
        if "Transfer-Encoding" in self.headers:
            self.close_connection = True
            return self.send_error(411, "send a Content-Length")
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, headers, {})
        reply = self.server.respond(request, raw)
        if isinstance(reply, Json):
            request.status = reply.status
            self._send(reply)
        else:
            request.status = 200
            return self._send_events(reply, request)
        return request.answered()

    do_GET = do_POST = do_DELETE = do_PUT = do_PATCH = do_HEAD = do_OPTIONS = _handle

    def _send(self, reply: Json) -> None:
        body = json.dumps(reply.body, ensure_ascii=False).encode()
        self._head(reply.status, {"Content-Type": "application/json", **reply.headers})
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_events(self, reply: Events, request: Request) -> None:
        kind = {
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }
        self._head(200, {**kind, **reply.headers})
        chunked = self.request_version != "HTTP/1.0"
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.close_connection = True
        self.end_headers()
        for event in reply.events:
            self._part(f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode(), chunked)
        if reply.ending == "done":
            request.answered()  # Before a client can have read the end.
            self._part(b"data: [DONE]\n\n", chunked)
        if reply.ending == "reset":
            self.close_connection = True
        elif chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _part(self, data: bytes, chunked: bool) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
        self.wfile.flush()

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
