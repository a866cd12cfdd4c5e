"""One streamed call: server-sent events as they come, and when."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_SHOWN = 300
"""Characters of an answer that is no stream of ours."""


class CallFailed(Exception):
    """The server said that it failed, or said nothing that makes sense."""


@dataclass
class Stream:
    """What has come so far. Times are of time.perf_counter."""

    ids: list[int] = field(default_factory=list)
    tokens: int = 0
    """Generated, by their ids; a chunk of text without any counts as one."""
    first: float | None = None
    last: float | None = None
    gaps_ms: list[float] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    """The object `prefillshare` of our router."""
    finished: str | None = None
    """Why the server stopped generating."""

    async def take(self, response: aiohttp.ClientResponse) -> None:
        """Read a response to its end. Raises CallFailed, aiohttp.ClientError, TimeoutError."""
        if response.status != 200:
            raise CallFailed(_said(await response.content.read(2**16)))
        if response.content_type != "text/event-stream":
            raise CallFailed(f"no stream but {response.content_type}: answer with stream: true")
        async for event in _events(response.content):
            try:
                self._take(event)
            except (AttributeError, TypeError):
                raise CallFailed(
                    f"an event is no chunk of an answer: {str(event)[:_SHOWN]}"
                ) from None
        if self.finished is None:
            raise CallFailed("the stream ended before the answer")

    def _take(self, event: Mapping[str, Any]) -> None:
        if "error" in event:
            raise CallFailed(_message(event["error"]))
        for choice in event.get("choices") or ():
            ids = choice.get("token_ids") or []
            said = choice.get("text") or _delta(choice.get("delta") or {})
            if count := len(ids) or bool(said):
                self.ids += ids
                self._count(count)
            self.finished = choice.get("finish_reason") or self.finished
        self.usage = event.get("usage") or self.usage
        self.report = event.get("prefillshare") or self.report

    def _count(self, count: int) -> None:
        now = time.perf_counter()
        if self.last is None:
            self.first = now
            self.gaps_ms += [0.0] * (count - 1)
        else:
            # Tokens of one chunk were not generated at once: a gap is of all of them.
            self.gaps_ms += [1000 * (now - self.last) / count] * count
        self.last = now
        self.tokens += count


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[Mapping[str, Any]]:
    """The events up to `[DONE]` or the end, whatever pieces they come in."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # Blank, a comment that keeps the connection alive, or another field.
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            try:
                event = json.loads(data)
            except ValueError:
                event = None
            if not isinstance(event, dict):
                raise CallFailed(f"an event is no JSON object: {data[:_SHOWN]!r}")
            yield event


def _delta(delta: Mapping[str, Any]) -> Any:
    """What a chunk of chat says, if anything."""
    return next(
        (
            delta[name]
            for name in ("content", "reasoning", "reasoning_content", "tool_calls")
            if delta.get(name)
        ),
        None,
    )


def _said(body: bytes) -> str:
    try:
        fields = json.loads(body)
    except ValueError:
        fields = None
    if isinstance(fields, dict) and "error" in fields:
        return _message(fields["error"])
    return body[:_SHOWN].decode(errors="replace")


def _message(error: object) -> str:
    if not isinstance(error, dict):
        return str(error)[:_SHOWN]
    code, message = error.get("code"), error.get("message")
    return f"{code}: {message}" if isinstance(code, str) else str(message)
