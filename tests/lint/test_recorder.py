"""The recorder changes nothing of what passes through it."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import zlib
from collections.abc import Iterator
from http.client import HTTPConnection, IncompleteRead, RemoteDisconnected
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from prefillshare_agents.testing import FakeServer
from prefillshare_server.errors import ConfigError
from prefillshare_server.lint import recorder
from prefillshare_server.lint.recorder import recording

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an answer may be written down long after its client has it."""
    monkeypatch.setattr(recorder, "_SETTLE_S", 60)


@pytest.fixture
def upstream() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def base_url(upstream: FakeServer, trace: Path) -> Iterator[str]:
    with recording(upstream.url, trace) as url:
        yield url


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="local", max_retries=0) as client:
        yield client


def entries(trace: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trace.read_text().splitlines()]


def test_a_call_passes_and_is_recorded(upstream: FakeServer, trace: Path) -> None:
    upstream.script("planner", "Hi there")
    with (
        recording(upstream.url, trace) as url,
        openai.OpenAI(base_url=url, api_key="local", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(
            model="planner",
            messages=HELLO,
            extra_headers={"X-Session-ID": "order-1"},
        )

    assert answer.choices[0].message.content == "Hi there"
    assert upstream.chats[0].sessions == ["order-1"]
    assert dict(upstream.chats[0].headers)["authorization"] == "Bearer local"
    (entry,) = entries(trace)
    assert entry["body"] == {"messages": HELLO, "model": "planner"}
    assert entry["headers"] == {"x-session-id": "order-1"}
    assert "authorization" not in json.dumps(entry).lower()
    assert entry["response"]["choices"][0]["message"]["content"] == "Hi there"


def test_a_stream_passes_piece_by_piece(upstream: FakeServer, client: openai.OpenAI) -> None:
    upstream.script("planner", "a rather long answer")
    chunks = list(client.chat.completions.create(model="planner", messages=HELLO, stream=True))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "a rather long answer"
    assert len(chunks) > 3


def test_an_error_keeps_its_status_and_body(upstream: FakeServer, client: openai.OpenAI) -> None:
    upstream.fail(422)

    with pytest.raises(openai.UnprocessableEntityError, match="a scripted failure"):
        client.chat.completions.create(model="planner", messages=HELLO)


def test_other_endpoints_pass_and_are_not_recorded(base_url: str, trace: Path) -> None:
    place = urlsplit(base_url)
    connection = HTTPConnection(place.hostname or "", place.port, timeout=60)
    connection.request("GET", "/v1/sessions/none")
    answer = connection.getresponse()

    assert (answer.status, json.load(answer)["error"]["code"]) == (404, "session_not_found")
    connection.close()
    assert not trace.exists()


def test_an_upstream_that_is_not_there_is_a_502_of_the_usual_shape(trace: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refuses
        target = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with (
            recording(target, trace) as url,
            openai.OpenAI(base_url=url, api_key="local", max_retries=0) as client,
            pytest.raises(openai.InternalServerError, match="does not answer") as error,
        ):
            client.chat.completions.create(model="planner", messages=HELLO)

    assert (error.value.status_code, error.value.code) == (502, "unreachable")
    assert len(entries(trace)) == 1


def test_an_upstream_that_breaks_off_breaks_off_for_the_client(trace: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with recording(target, trace) as url:
            place = urlsplit(url)
            connection = HTTPConnection(place.hostname or "", place.port, timeout=60)
            connection.request("POST", "/v1/chat/completions", json.dumps({"messages": HELLO}))
            upstream, _ = listener.accept()
            with upstream:
                upstream.recv(65536)
                head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                upstream.sendall(head + b"5\r\ndata:\r\n")
            with pytest.raises((IncompleteRead, RemoteDisconnected, ConnectionError)):
                connection.getresponse().read()
            connection.close()


def test_a_first_piece_is_passed_before_the_second_is_there(trace: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with recording(target, trace) as url:
            place = urlsplit(url)
            connection = HTTPConnection(place.hostname or "", place.port, timeout=60)
            connection.request("POST", "/v1/chat/completions", json.dumps({"messages": HELLO}))
            upstream, _ = listener.accept()
            with upstream:
                upstream.recv(65536)
                head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                upstream.sendall(head + b"5\r\ndata:\r\n")
                answer = connection.getresponse()
                assert answer.read1() == b"data:"
                upstream.sendall(b"3\r\nend\r\n0\r\n\r\n")
                assert answer.read() == b"end"
            connection.close()


@pytest.mark.parametrize("upstream_url", ["127.0.0.1:8000", "ftp://x/v1", "http://x:port/v1"])
def test_an_upstream_that_is_no_url_is_refused(upstream_url: str, trace: Path) -> None:
    with pytest.raises(ConfigError, match="no base URL"), recording(upstream_url, trace):
        pass


class Packed(BaseHTTPRequestHandler):
    """Answers every chat in the encoding that its server is told, and notes what was asked."""

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        server.asked.append((self.path, self.headers["Host"], self.headers["Proxy-Authorization"]))
        message = {"role": "assistant", "content": "Hi there"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        found = {"id": "1", "object": "chat.completion", "created": 1, "model": "planner"}
        name, pack = server.packing
        data = pack(json.dumps({**found, "choices": [choice]}).encode())
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        if name:
            self.send_header("Content-Encoding", name)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def packed() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Packed) as server:
        server.packing, server.asked = ("", bytes), []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    "packing", [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", deflated)]
)
def test_an_answer_that_came_packed_is_kept_as_text(
    packed: Any, trace: Path, packing: tuple[str, Any]
) -> None:
    packed.packing = packing
    with (
        recording(f"http://127.0.0.1:{packed.server_port}/v1", trace) as url,
        openai.OpenAI(base_url=url, api_key="local", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(model="planner", messages=HELLO)

    assert answer.choices[0].message.content == "Hi there"
    assert entries(trace)[0]["response"]["choices"][0]["message"]["content"] == "Hi there"


def test_the_upstream_is_reached_through_the_proxy_of_the_environment(
    packed: Any, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HTTP_PROXY", f"http://me:it%20is@127.0.0.1:{packed.server_port}")
    with (
        recording("http://model.internal/v1", trace) as url,
        openai.OpenAI(base_url=url, api_key="local", max_retries=0) as client,
    ):
        client.chat.completions.create(model="planner", messages=HELLO)

    asked = ("http://model.internal/v1/chat/completions", "model.internal", "Basic bWU6aXQgaXM=")
    assert packed.asked == [asked]


def test_an_https_upstream_is_reached_through_a_tunnel(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{listener.getsockname()[1]}")
        with recording("https://model.internal/v1", trace) as url:
            place = urlsplit(url)
            connection = HTTPConnection(place.hostname or "", place.port, timeout=60)
            connection.request("POST", "/v1/chat/completions", json.dumps({"messages": HELLO}))
            proxy, _ = listener.accept()
            with proxy:
                assert proxy.recv(65536).startswith(b"CONNECT model.internal:443 HTTP/1.")
                proxy.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            assert connection.getresponse().status == 502
            connection.close()


def test_a_host_that_needs_no_proxy_is_asked_itself(
    upstream: FakeServer, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with (
        recording(upstream.url, trace) as url,
        openai.OpenAI(base_url=url, api_key="local", max_retries=0) as client,
    ):
        assert client.chat.completions.create(model="planner", messages=HELLO)


def test_a_proxy_of_another_kind_is_refused(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:1080")
    with (
        pytest.raises(ConfigError, match="no proxy that the recorder can speak to"),
        recording("https://model.internal/v1", trace),
    ):
        pass
