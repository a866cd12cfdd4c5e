"""A proxy between the router and a decode worker that breaks answers off in the middle.

Everything passes through it as it is, until a rule says that the answer to a request is to be cut:
then the connection is reset on both sides, as if the worker had died at that moment.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self
from urllib.parse import urlsplit

from prefillshare_server.router.topology import WorkerEndpoint
from tests.worker.driver import LoopThread

_GENERATING = (b"POST /v1/chat/completions ", b"POST /v1/completions ")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Attempt:
    """A request to a decode worker to generate."""

    worker: str
    body: dict[str, Any]

    @property
    def generated(self) -> int:
        """Tokens of the answer that the request brings along, and the worker replays."""
        ours = self.body["kv_transfer_params"].get("prefillshare", {})
        return len(ours.get("generated_ids", ()))


Rule = Callable[[Attempt], int | None]
"""After how many events with token ids to cut the answer, replayed ones counted; 0 is before its
first byte, which is all that can be cut of an answer that is no stream. None lets it pass."""


def never(attempt: Attempt) -> int | None:
    """Let every answer pass."""
    return None


@dataclass
class CutProxies:
    """A proxy for each decode worker that `reach` was asked for. The rule may change any time."""

    rule: Rule = never
    cuts: int = 0
    """Answers cut so far in front of their last token."""
    late_cuts: int = 0
    """Answers cut behind it: only the end of the stream was missing."""
    _loop: LoopThread = field(default_factory=LoopThread)
    _servers: list[asyncio.Server] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._close())
        self._loop.close()

    def reach(self, worker: WorkerEndpoint) -> WorkerEndpoint:
        """The worker as the router is to see it: a decode worker through a proxy."""
        if worker.phase == "prefill":
            return worker
        return replace(worker, url=self._loop.run(self._listen(worker)))

    async def _listen(self, worker: WorkerEndpoint) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _Connection(self, worker, reader, writer).run()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self._servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class _Connection:
    """One connection of the router, and the one to the worker that belongs to it."""

    def __init__(
        self,
        proxies: CutProxies,
        worker: WorkerEndpoint,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._proxies = proxies
        self._worker = worker
        self._reader = reader
        self._writer = writer
        self._left: int | None = None
        """Events with token ids that still pass; None if the answer is not to be cut."""
        self._event = b""
        self._complete = False
        """The last token is among those events."""

    async def run(self) -> None:
        """Serve until either side closes; closes both."""
        target = urlsplit(self._worker.url)
        try:
            reader, writer = await asyncio.open_connection(target.hostname, target.port)
        except OSError:
            _reset(self._writer)
            return
        ways = [
            asyncio.create_task(self._requests(writer)),
            asyncio.create_task(self._answers(reader)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for each in (writer, self._writer):
                each.close()

    async def _requests(self, worker: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await self._reader.readuntil(b"\r\n\r\n")
                body = await self._reader.readexactly(_content_length(head))
                self._left, self._event, self._complete = None, b"", False
                if head.startswith(_GENERATING):
                    attempt = Attempt(self._worker.id, json.loads(body))
                    self._left = self._proxies.rule(attempt)
                worker.write(head + body)
                await worker.drain()

    async def _answers(self, worker: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while data := await worker.read(1 << 16):
                passing = self._until_cut(data)
                if passing is None:
                    self._writer.write(data)
                else:
                    self._proxies.cuts += not self._complete
                    self._proxies.late_cuts += self._complete
                    self._writer.write(passing)
                await self._writer.drain()
                if passing is not None:
                    _reset(self._writer)
                    return

    def _until_cut(self, data: bytes) -> bytes | None:
        """The part of `data` before the cut; None if there is none in it."""
        if self._left is None:
            return None
        position = 0
        while self._left:
            end = data.find(b"\n\n", position)
            if end < 0:
                self._event += data[position:]
                return None
            end += 2
            for choice in _choices(self._event + data[position:end]):
                self._left -= bool(choice.get("token_ids"))
                self._complete |= choice.get("finish_reason") is not None
            self._event, position = b"", end
        return data[:position]


def _choices(event: bytes) -> list[dict[str, Any]]:
    """Choices in a server-sent event, with whatever frames it. A stream has one of them."""
    _, found, payload = event.partition(b"data: ")
    if not found or payload.startswith(b"[DONE]"):
        return []
    return list(json.loads(payload).get("choices", ()))


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with an RST rather than in peace."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
