"""A session: one growing context that several roles read and answer in turn."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal, Self, overload

import openai
from openai.types.chat import ChatCompletion

from . import _context
from ._client import AsyncOpenAI, OpenAI
from ._core import SessionCore, check_client
from ._records import SessionTotals
from ._stream import AsyncChatStream, ChatStream, StreamedAnswer
from ._transcript import Message

Tools = Iterable[Mapping[str, Any]]


class Session(SessionCore):
    """One context, answered by many roles, prefilled once.

    >>> session = Session(base_url="http://127.0.0.1:8000/v1")
    >>> session.append({"role": "user", "content": "Is 91 a prime number?"})
    >>> session.chat("planner", instructions="Say in one line how to find out.")
    >>> session.chat("critic", instructions="Answer yes or no.")
    >>> session.usage.cached_tokens

    `with session:` makes it the current session of the block: calls of this package's clients and
    LangGraph nodes inside belong to it. Leaving the block does not end the session, `close` does.
    Safe under concurrent calls: each sees the context of its start, answers join as they end.
    """

    def __init__(
        self,
        id: str | None = None,
        *,
        client: openai.OpenAI | None = None,
        base_url: str | None = None,
        api_key: str = "local",
        messages: Iterable[Message] = (),
    ) -> None:
        """Make a session, or join the one that has this `id` on the server.

        Calls go through `client`, or through an own one to `base_url`; a session without either
        can only be entered with `with`.
        """
        super().__init__(id, messages)
        self._client = client
        self._owns_client = client is None and base_url is not None
        if client is not None:
            if base_url is not None:
                raise ValueError("give client= or base_url=, not both")
            check_client(client)
        elif base_url is not None:
            self._client = OpenAI(base_url=base_url, api_key=api_key)

    @overload
    def chat(
        self,
        role: str,
        /,
        *,
        instructions: str | None = None,
        tools: Tools | None = None,
        stream: Literal[False] = False,
        **options: Any,
    ) -> ChatCompletion: ...
    @overload
    def chat(
        self,
        role: str,
        /,
        *,
        instructions: str | None = None,
        tools: Tools | None = None,
        stream: Literal[True],
        **options: Any,
    ) -> ChatStream: ...
    def chat(
        self,
        role: str,
        /,
        *,
        instructions: str | None = None,
        tools: Tools | None = None,
        stream: bool = False,
        **options: Any,
    ) -> ChatCompletion | ChatStream:
        """Let `role` answer the context; its answer then joins the context.

        `instructions` and `tools` are for this call only and never become part of the context.
        Other options are those of `chat.completions.create`. With `stream=True` the answer joins
        when the stream has been read to its end. Raises what openai's client raises; then the
        context is as before.
        """
        request = self._request(role, instructions, tools, {**options, "stream": stream})
        started = time.perf_counter()
        if stream:
            source = self._connected().chat.completions.create(**request)
            return ChatStream(source, StreamedAnswer(role, started), self._finish)
        completion: ChatCompletion = self._connected().chat.completions.create(**request)
        self._finish_completion(role, completion, time.perf_counter() - started)
        return completion

    def totals(self) -> SessionTotals:
        """Ask the server for its ledger. Raises openai.NotFoundError before the first call."""
        return SessionTotals.model_validate(self._connected().get(self._path, cast_to=object))

    def close(self) -> None:
        """End the session on the server, freeing what it holds there. Does nothing if ended.

        Raises what openai's client raises; then it takes no more chats but can be closed again.
        """
        if self._ended:
            return
        self._closed = True
        if self._client is not None:
            with suppress(openai.NotFoundError):  # never used, or already expired there
                self._client.delete(self._path, cast_to=object)
            if self._owns_client:
                self._client.close()
        self._ended = True

    def _connected(self) -> openai.OpenAI:
        if self._client is None:
            raise RuntimeError(f"session {self.id!r} has no client; give client= or base_url=")
        if self._ended and self._owns_client:
            raise RuntimeError(
                f"session {self.id!r} is closed, and its client with it; ask before close()"
            )
        return self._client

    def __enter__(self) -> Self:
        _context.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        _context.leave(self)


class AsyncSession(SessionCore):
    """The async twin of `Session`: `await session.chat(...)`, `async with session:`."""

    def __init__(
        self,
        id: str | None = None,
        *,
        client: openai.AsyncOpenAI | None = None,
        base_url: str | None = None,
        api_key: str = "local",
        messages: Iterable[Message] = (),
    ) -> None:
        super().__init__(id, messages)
        self._client = client
        self._owns_client = client is None and base_url is not None
        if client is not None:
            if base_url is not None:
                raise ValueError("give client= or base_url=, not both")
            check_client(client)
        elif base_url is not None:
            self._client = AsyncOpenAI(base_url=base_url, api_key=api_key)

    @overload
    async def chat(
        self,
        role: str,
        /,
        *,
        instructions: str | None = None,
        tools: Tools | None = None,
        stream: Literal[False] = False,
        **options: Any,
    ) -> ChatCompletion: ...
    @overload
    async def chat(
        self,
        role: str,
        /,
        *,
        instructions: str | None = None,
        tools: Tools | None = None,
        stream: Literal[True],
        **options: Any,
    ) -> AsyncChatStream: ...
    async def chat(
        self,
        role: str,
        /,
        *,
        instructions: str | None = None,
        tools: Tools | None = None,
        stream: bool = False,
        **options: Any,
    ) -> ChatCompletion | AsyncChatStream:
        """Let `role` answer the context; see `Session.chat`."""
        request = self._request(role, instructions, tools, {**options, "stream": stream})
        started = time.perf_counter()
        if stream:
            source = await self._connected().chat.completions.create(**request)
            return AsyncChatStream(source, StreamedAnswer(role, started), self._finish)
        completion: ChatCompletion = await self._connected().chat.completions.create(**request)
        self._finish_completion(role, completion, time.perf_counter() - started)
        return completion

    async def totals(self) -> SessionTotals:
        """Ask the server for its ledger. Raises openai.NotFoundError before the first call."""
        return SessionTotals.model_validate(await self._connected().get(self._path, cast_to=object))

    async def close(self) -> None:
        """End the session on the server, freeing what it holds there. Does nothing if ended.

        Raises what openai's client raises; then it takes no more chats but can be closed again.
        """
        if self._ended:
            return
        self._closed = True
        if self._client is not None:
            with suppress(openai.NotFoundError):  # never used, or already expired there
                await self._client.delete(self._path, cast_to=object)
            if self._owns_client:
                await self._client.close()
        self._ended = True

    def _connected(self) -> openai.AsyncOpenAI:
        if self._client is None:
            raise RuntimeError(f"session {self.id!r} has no client; give client= or base_url=")
        if self._ended and self._owns_client:
            raise RuntimeError(
                f"session {self.id!r} is closed, and its client with it; ask before close()"
            )
        return self._client

    async def __aenter__(self) -> Self:
        _context.enter(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        _context.leave(self)
