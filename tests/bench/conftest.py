"""A real router over mock workers, and a MOCK server that streams what its script says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner, Result

from prefillshare_bench.traces import Call, RecordedCall, Session, Workload
from prefillshare_server.cli import app
from tests.router.conftest import base_dir, start, tokenizer

__all__ = ["base_dir", "start", "tokenizer"]

Event = Mapping[str, Any] | str | bytes
Script = Callable[[dict[str, Any]], list[Event]]


def chunk(*ids: int, finish: str | None = None) -> dict[str, Any]:
    """A chunk of a completion that carries token ids."""
    choice = {"index": 0, "text": "x" * len(ids), "token_ids": [*ids], "finish_reason": finish}
    return {"choices": [choice]}


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """The chunk at the end of a stream."""
    details = {"cached_tokens": cached}
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": details,
        },
    }


def answer(body: dict[str, Any]) -> list[Event]:
    """So many tokens as were asked for, a chunk each, all the same as the prompt's length."""
    length, count = len(body.get("prompt", ())), body["max_tokens"]
    chunks: list[Event] = [chunk(length) for _ in range(count - 1)]
    return [*chunks, chunk(length, finish="length"), usage(length, count), "[DONE]"]


@dataclass
class MockServer:
    """A MOCK of vLLM's server: no tokens are computed."""

    script: Script = answer
    refuse: Callable[[dict[str, Any]], int] = lambda body: 200
    """The status of a call; its body says why."""
    silent_for: frozenset[str] = frozenset()
    """Roles whose calls are never answered."""
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    gather: int = 0
    """No call is answered before so many came at once."""
    gathered: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append({"path": request.path, **body})
        self.headers.append(request.headers)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if self.most_at_once >= self.gather:
            self.gathered.set()
        try:
            await self.gathered.wait()
            if body["model"] in self.silent_for:
                await asyncio.Event().wait()
            if (status := self.refuse(body)) != 200:
                error = {"error": {"message": "no room", "code": "queue_full"}}
                return web.json_response(error, status=status)
            return await self._stream(request, body)
        finally:
            self.at_once -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self.script(body):
            # Lets other calls come in between.
            await asyncio.sleep(0)
            if isinstance(event, bytes):
                await response.write(event)
                continue
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(b"data: " + data.encode() + b"\n\n")
        return response

    async def end(self, request: web.Request) -> web.Response:
        self.ended.append(request.match_info["id"])
        return web.json_response({"deleted": True})


@pytest.fixture
async def server() -> AsyncIterator[MockServer]:
    """A mock server that is served."""
    async with served(MockServer()) as mock:
        yield mock


class served:
    """Context manager: serves a mock server on a free port."""

    def __init__(self, mock: MockServer) -> None:
        self._mock = mock
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/completions", mock.generate),
                web.post("/v1/chat/completions", mock.generate),
                web.delete("/v1/sessions/{id}", mock.end),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)

    async def __aenter__(self) -> MockServer:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._mock.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self._mock

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


def bench(*arguments: object) -> Result:
    """`prefillshare bench …`, which succeeds."""
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def computed_once(workload: Workload, **options: Any) -> int:
    """`Session.prefill_tokens` of all calls of all sessions."""
    each = (session.prefill_tokens(workload.head, **options) for session in workload.sessions)
    return sum(sum(tokens or ()) for tokens in each)


def small(
    *calls: Call | RecordedCall, sessions: int = 1, roles: tuple[str, ...] = ("alpha", "beta")
) -> Workload:
    """Sessions that are all the same, one each time unit."""
    each = calls or (
        Call(role="alpha", new=40, tail=3, answer=4),
        Call(role="beta", new=20, tail=2, answer=3),
        Call(role="alpha", new=20, tail=3, answer=2),
    )
    return Workload(
        name="small",
        seed=7,
        roles=roles,
        head=16,
        sessions=tuple(
            Session(id=f"s{number}", arrival=number, calls=each) for number in range(sessions)
        ),
    )
