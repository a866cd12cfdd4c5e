"""Evaluation against a server: what is sent, and what happens when the server does not answer."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_training.evaluate.engine import Answer
from prefillshare_training.evaluate.run import EvalSettings, evaluate
from prefillshare_training.evaluate.served import Served

CONTEXT = 64


@dataclass
class Echo:
    """A server whose roles answer with the prompt's last token, plus one."""

    url: str = ""
    status: int = 200
    busy: int = 0
    """So many calls are turned away first."""
    finish: str = "stop"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    together: int = 1
    """So many calls have to run at a time before the first is answered."""
    full: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def models(self) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "created": 0,
                    "owned_by": "x",
                    "max_model_len": CONTEXT,
                    "prefillshare": {"callable": name != "base"},
                }
                for name in ("solver", "critic", "base")
            ],
        }

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.bodies.append(body)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            if self.at_once == self.together:
                self.full.set()
        self.full.wait(60)
        if self.together > 1:
            time.sleep(0.1)  # One more, if more can come.
        with self.lock:
            self.at_once -= 1
        token = body["prompt"][-1] + 1
        choice = {
            "index": 0,
            "text": "x",
            "finish_reason": self.finish,
            "token_ids": [token],
            "logprobs": {
                "tokens": ["x"],
                "token_logprobs": [-0.5],
                "text_offset": [0],
                "top_logprobs": [{}],
            },
        }
        return {"id": "1", "object": "text_completion", "created": 0, "model": "m",
                "choices": [choice]}  # fmt: skip


@contextmanager
def listening(echo: Echo) -> Iterator[Echo]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(200, echo.models())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with echo.lock:
                busy = echo.busy > 0
                echo.busy -= busy
            if busy:
                self.answer(503, {"error": {"message": "no worker is free"}})
            elif echo.status != 200:
                self.answer(echo.status, {"error": {"message": "the worker is gone"}})
            else:
                self.answer(200, echo.complete(body))

        def answer(self, status: int, value: dict[str, Any]) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    echo.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield echo
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def echo() -> Iterator[Echo]:
    with listening(Echo()) as found:
        yield found


def test_prompts_are_sent_as_token_ids(echo: Echo) -> None:
    seen: dict[int, Answer] = {}
    served = Served(echo.url + "/v1/", "solver")
    found = served.generate([[1, 2], [7]], max_tokens=5, stop_ids={9, 8}, progress=seen.__setitem__)
    assert found == [Answer((3,), (-0.5,), "stop"), Answer((8,), (-0.5,), "stop")]
    assert seen == dict(enumerate(found))
    [body] = [body for body in echo.bodies if body["prompt"] == [1, 2]]
    expected = {"model": "solver", "temperature": 0, "max_tokens": 5, "return_token_ids": True}
    assert body.items() >= {**expected, "logprobs": 0}.items()
    assert body["stop_token_ids"] == [8, 9]
    assert body["repetition_penalty"] == 1, "a checkpoint's own default would not be greedy"


def test_an_answer_has_the_room_the_context_leaves(echo: Echo) -> None:
    Served(echo.url, "solver").generate([[1] * 60], max_tokens=20)
    assert echo.bodies[0]["max_tokens"] == CONTEXT - 60


def test_so_many_calls_run_at_a_time(echo: Echo) -> None:
    echo.together = 2
    Served(echo.url, "solver", concurrency=2).generate([[n] for n in range(6)], max_tokens=1)
    assert echo.most_at_once == 2


@pytest.mark.parametrize("role", ["judge", "base"])
def test_an_unknown_role_is_told_the_known_ones(echo: Echo, role: str) -> None:
    with pytest.raises(ConfigError, match="serves no such role; name one of: critic, solver"):
        Served(echo.url, role)


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"cannot be reached.*prefillshare serve"):
        Served("http://127.0.0.1:9", "solver")


def test_a_server_that_fails_ends_the_evaluation_with_its_words(echo: Echo) -> None:
    served = Served(echo.url, "solver")
    echo.status = 400
    with pytest.raises(ConfigError, match=r"answered 400: .*the worker is gone"):
        served.generate([[1], [2]], max_tokens=1)


def test_a_call_that_a_busy_server_turns_away_is_made_again(echo: Echo) -> None:
    echo.busy = 1
    found = Served(echo.url, "solver").generate([[1], [2]], max_tokens=1)
    assert [answer.ids for answer in found] == [(2,), (3,)]


def test_an_answer_that_the_server_broke_off_is_none(echo: Echo) -> None:
    echo.finish = "abort"
    with pytest.raises(ConfigError, match=r"broke an answer off \(abort\)"):
        Served(echo.url, "solver").generate([[1], [2]], max_tokens=1)


def test_what_goes_wrong_with_an_answer_is_raised_as_it_is(echo: Echo) -> None:
    def full(*_: object) -> None:
        raise ConfigError(Problem("answers.jsonl", "cannot be written", "free some space"))

    with pytest.raises(ConfigError, match=r"answers\.jsonl: cannot be written"):
        Served(echo.url, "solver").generate([[1], [2]], max_tokens=1, progress=full)


def test_an_evaluation_asks_the_role(echo: Echo, base_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    # The next token is the next letter.
    data.write_text('{"prompt": "abc", "answer": "d"}\n{"prompt": "xy", "answer": "b"}\n')
    settings = EvalSettings(
        base=str(base_dir),
        data=str(data),
        server=echo.url,
        role="critic",
        out=tmp_path / "answers.jsonl",
    )
    result = evaluate(settings, Console(quiet=True))
    assert (result.mode, result.n, result.accuracy) == ("served", 2, 50)
    assert result.settings["decoder"] == {"server": echo.url, "role": "critic"}
