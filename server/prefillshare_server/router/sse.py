"""Server-sent events, as vLLM writes them: one `data:` line of JSON per event."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from pydantic_core import from_json, to_json

DONE = b"data: [DONE]\n\n"


def encode(data: Any) -> bytes:
    """One event."""
    return b"data: " + to_json(data) + b"\n\n"


async def decode(
    chunks: AsyncIterator[bytes], *, first_s: float, next_s: float
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a byte stream up to `[DONE]` or its end.

    Raises TimeoutError if the first event takes longer than `first_s`, or bytes of a later one
    longer than `next_s`.
    """
    rest = b""
    limit = first_s
    while True:
        async with asyncio.timeout(limit):
            chunk = await anext(chunks, None)
        if chunk is None:
            return
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data:"):
                continue  # A comment, which keeps the connection alive.
            data = event[5:].strip()
            if data == b"[DONE]":
                return
            limit = next_s
            yield from_json(data)
