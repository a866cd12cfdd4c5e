"""A fake server leaves nothing behind, whatever its clients are doing."""

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
        idle = socket.create_connection(("127.0.0.1", server.port))
        for stream in streams:
            next(stream)

    assert set(threading.enumerate()) <= others
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
        server.wait_for_chats(1)
    thread.join(10)

    assert not thread.is_alive()
    assert set(threading.enumerate()) <= others
    client.close()


def test_a_reader_that_leaves_a_stream_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        server.script(["word " * 5000])
        with openai.OpenAI(base_url=server.url, api_key="local") as client:
            stream = client.chat.completions.create(model="planner", messages=HELLO, stream=True)
            next(stream)
            stream.close()

    assert server.chats[0].answered_at is None
    assert capsys.readouterr().err == ""


def test_stopping_twice_or_before_the_start_is_harmless() -> None:
    server = FakeServer()
    server.start()
    server.stop()
    server.stop()
    FakeServer().stop()
