"""A fake server leaves nothing behind, whatever its clients are doing."""

import http.client
import socket
import threading
from typing import Any

import openai
import pytest

from prefillshare_agents.testing import FakeServer

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def others() -> set[threading.Thread]:
    """The threads that were there before the test."""
    return set(threading.enumerate())


def require_no_more_than(expected: set[threading.Thread]) -> None:
    """Raise AssertionError unless all other threads end, for which a busy machine may take long."""
    for thread in set(threading.enumerate()) - expected:
        thread.join(60)
    assert set(threading.enumerate()) <= expected


def test_open_streams_and_idle_connections_end_with_the_server(
    others: set[threading.Thread],
) -> None:
    with FakeServer() as server:
        server.delay(threading.Event(), after=1)
        client = openai.OpenAI(base_url=server.url, api_key="local", max_retries=0)
        streams = [
            client.chat.completions.create(model="planner", messages=HELLO, stream=True)
            for _ in range(3)
        ]
        idle = http.client.HTTPConnection("127.0.0.1", server.port)
        idle.request("GET", "/live")
        assert idle.getresponse().read()
        for stream in streams:
            next(stream)

    require_no_more_than(others)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    idle.close()
    client.close()


def test_a_held_answer_does_not_keep_the_server(others: set[threading.Thread]) -> None:
    def ask() -> None:
        with pytest.raises(openai.APIConnectionError):
            client.chat.completions.create(model="planner", messages=HELLO)

    client = openai.OpenAI(base_url="http://unused", api_key="local", max_retries=0)
    with FakeServer() as server:
        client.base_url = server.url
        server.delay(threading.Event())
        thread = threading.Thread(target=ask)
        thread.start()
        server.wait_for_chats(1, 60)

    require_no_more_than(others)
    client.close()


def test_a_reader_that_leaves_a_stream_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    left = threading.Event()
    with FakeServer() as server:
        at_rest = set(threading.enumerate())
        server.script(["word " * 5000])
        # Not held, all of it may be on its way before its reader leaves.
        server.delay(left, after=1)
        with openai.OpenAI(base_url=server.url, api_key="local") as client:
            stream = client.chat.completions.create(model="planner", messages=HELLO, stream=True)
            next(stream)
            stream.close()
        left.set()
        require_no_more_than(at_rest)

    assert server.chats[0].answered_at is None
    assert capsys.readouterr().err == ""


def test_stopping_twice_or_before_the_start_is_harmless() -> None:
    server = FakeServer()
    server.start()
    server.stop()
    server.stop()
    FakeServer().stop()
