"""A client of the router inside its process: it speaks ASGI as uvicorn does, and can leave."""

import asyncio
import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette

Message = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True)
class Leave:
    """When a client closes its connection; what comes first counts."""

    after_s: float | None = None
    after_chunks: int | None = None
    """Parts of the response's body that it has read."""
    on: asyncio.Event | None = None


@dataclass
class Outcome:
    """What a client has of its call when the call is over."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    left: bool = False
    """The client closed the connection before the response was complete."""
    complete: bool = False
    """The response's end was sent."""
    hung: bool = False
    crash: BaseException | None = None
    """What the application raised."""
    started_at: float = 0.0
    ended_at: float = 0.0
    """On the loop's clock."""

    @property
    def streamed(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def events(self) -> list[Any]:
        """Events of a stream, `[DONE]` as a string. Raises ValueError for what is none."""
        text = self.body.decode()
        if text and not text.endswith("\n\n"):
            raise ValueError(f"the stream ends inside an event: {text[-80:]!r}")
        events = []
        for line in text.split("\n\n")[:-1]:
            if not line.startswith("data: "):
                raise ValueError(f"not an event: {line!r}")
            data = line.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
        return events

    def json(self) -> Any:
        return json.loads(self.body)


class _Connection:
    def __init__(self, body: bytes, outcome: Outcome, leave: Leave | None) -> None:
        self._body: bytes | None = body
        self._outcome = outcome
        self._leave = leave
        self._chunks = 0
        self.gone = (leave.on if leave is not None else None) or asyncio.Event()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        outcome = self._outcome
        # As uvicorn does: what is sent to a client that left disappears.
        if self.gone.is_set():
            return
        if message["type"] == "http.response.start":
            outcome.status = message["status"]
            outcome.headers = {key.decode(): value.decode() for key, value in message["headers"]}
        elif message["type"] == "http.response.body":
            outcome.body += message.get("body", b"")
            if not message.get("more_body", False):
                outcome.complete = True
            self._chunks += 1
            leave = self._leave
            if leave is not None and leave.after_chunks == self._chunks and not outcome.complete:
                self.gone.set()
        # uvicorn waits here for a full socket, so other tasks get their turn.
        await asyncio.sleep(0)


async def request(
    app: Starlette,
    method: str,
    path: str,
    body: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    leave: Leave | None = None,
    limit_s: float = 600.0,
) -> Outcome:
    """Send one request and wait for its end, at most `limit_s` of the loop's time. Never raises."""
    loop = asyncio.get_running_loop()
    outcome = Outcome(started_at=loop.time())
    raw = b"" if body is None else json.dumps(body).encode()
    connection = _Connection(raw, outcome, leave)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            *((key.lower().encode(), value.encode()) for key, value in (headers or {}).items()),
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    leaving = None
    if leave is not None and leave.after_s is not None:
        leaving = loop.call_later(leave.after_s, connection.gone.set)
    running = asyncio.ensure_future(app(scope, connection.receive, connection.send))
    await asyncio.wait([running], timeout=limit_s)
    if leaving is not None:
        leaving.cancel()
    outcome.ended_at = loop.time()
    outcome.left = connection.gone.is_set() and not outcome.complete
    if not running.done():
        outcome.hung = True
        running.cancel()
        await asyncio.wait([running], timeout=5)
    elif running.exception() is not None:
        outcome.crash = running.exception()
    # The connection of a client that has its response is still open: it closes it now.
    connection.gone.set()
    return outcome
