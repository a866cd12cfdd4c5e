"""Bodies of requests; a call as an HTTP response, JSON or server-sent events.

A call is watched for its client's leaving.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prefillshare_server.router import sse
from prefillshare_server.router.account import Head
from prefillshare_server.router.ask import Ask
from prefillshare_server.router.call import call
from prefillshare_server.router.errors import RouterError, body_too_large
from prefillshare_server.router.fanout import Answer
from prefillshare_server.router.parts import Router

T = TypeVar("T")

logger = logging.getLogger(__name__)

_INTERNAL = RouterError(
    500,
    "the router failed; its log has the details",
    type="server_error",
    code="internal_error",
)


class JSON(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def error_response(error: RouterError, request_id: str | None = None) -> JSON:
    """An error as the whole response."""
    headers = dict(error.headers)
    if request_id is not None:
        headers["X-Request-Id"] = request_id
    return JSON(error.body(), status_code=error.status, headers=headers)


async def read_body(request: Request, limit_mb: int) -> bytes:
    """A request's whole body. Raises RouterError(413) beyond `limit_mb` MiB."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit_mb * 2**20:
            raise body_too_large(limit_mb)
    return bytes(body)


class CallResponse(Response):
    """Runs a call while it is being sent. A client that leaves ends the call at once."""

    def __init__(self, router: Router, ask: Ask) -> None:
        self._router = router
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.create_task(self._answer(scope, receive, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            result = answering.result() if _succeeded(answering) else "client_closed"
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            seconds = time.perf_counter() - self._ask.started_at
            self._router.metrics.ended(self._ask.role, result, seconds)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Send everything; returns how the call ended, for the metrics. Never raises an error."""
        async with aclosing(call(self._router, self._ask)) as parts:
            try:
                head = await anext(parts)
                assert isinstance(head, Head), "a call starts with its head"
                # Waiting for the first part as well lets an early failure have its own status.
                first = await anext(parts)
            except Exception as reason:
                error = _as_router_error(reason)
                await error_response(error, self._ask.request_id)(scope, receive, send)
                return error.code or "client_error"
            if not self._ask.stream:
                await anext(parts, None)  # Lets the call come to its end before it is answered.
                await JSON(first, headers=head.headers)(scope, receive, send)
                return "ok"
            return await self._stream(head.headers, first, parts, send)

    async def _stream(
        self,
        headers: Mapping[str, str],
        part: Head | Answer,
        parts: AsyncGenerator[Head | Answer, None],
        send: Send,
    ) -> str:
        now = time.perf_counter()
        self._router.metrics.first_chunk(self._ask.role, now - self._ask.started_at)
        await send(_start(headers))
        result = "ok"
        try:
            await send(_more(sse.encode(part)))
            async for part in parts:
                before, now = now, time.perf_counter()
                self._router.metrics.next_chunk(self._ask.role, now - before)
                await send(_more(sse.encode(part)))
            await send(_more(sse.DONE))
        except Exception as reason:
            error = _as_router_error(reason)
            result = error.code or "client_error"
            self._router.metrics.stream_failed(result)
            await send(_more(sse.encode(error.body())))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return result


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which ends when the client leaves; raises ClientDisconnect then."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _succeeded(task: asyncio.Task[str]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _as_router_error(reason: Exception) -> RouterError:
    if isinstance(reason, RouterError):
        return reason
    logger.error("a call failed inside the router", exc_info=reason)
    return _INTERNAL


def _start(headers: Mapping[str, str]) -> dict[str, Any]:
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    raw += [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        # Proxies such as nginx would collect the tokens.
        (b"x-accel-buffering", b"no"),
    ]
    return {"type": "http.response.start", "status": 200, "headers": raw}


def _more(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}
