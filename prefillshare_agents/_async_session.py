"""The async twin of `Session`: `await session.chat(...)`, `async with session:`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

import openai
from openai.types.chat import ChatCompletion

from . import _context, _prefix_watch, _saved
from ._client import AsyncOpenAI
from ._core import (
    HINT,
    Mode,
    SessionCore,
    Tools,
)
from ._counting import acount, acount_if_needed
from ._identity import SESSION_HEADER
from ._limits import ContextWindow
from ._options import AsyncLoadOptions
from ._records import PrefillAhead, SessionTotals
from ._stream import AsyncChatStream, StreamedAnswer
from ._transcript import Message

if TYPE_CHECKING:
    from prefillshare_prefix import Report


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "append(..., prefill=True) outside a coroutine: no event loop is running that could "
            "ask the server. Append in a coroutine, or with prefill=False"
        ) from None


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
        mode: Mode = "share",
        speakers: bool = True,
        prefill: bool = False,
        token_budget: int | None = None,
        context_window: ContextWindow = "auto",
    ) -> None:
        """Make a session, or join the one that has this `id` on the server; see `Session`."""
        super().__init__(
            id,
            messages,
            mode=mode,
            speakers=speakers,
            prefill=prefill,
            token_budget=token_budget,
            context_window=context_window,
        )
        self._prefilling: set[asyncio.Task[None]] = set()
        self._client = self._client_of(client, base_url, partial(AsyncOpenAI, api_key=api_key))

    def append(self, *messages: Message, prefill: bool | None = None) -> None:
        """Add messages to the context; see `Session.append`.

        Does not wait: with `prefill` a task asks the server, and the next call waits for it to
        have been asked.
        """
        ahead = self._prefills_ahead(prefill)
        if ahead:
            self._connected()  # Raises before anything is added, as the next line does.
            loop = _running_loop()
        self._transcript.append(messages)
        if ahead:
            try:
                context = self._context()
            except ValueError as error:
                self._cannot_prefill(error)
                return
            task = loop.create_task(self._prefill_quietly(context))
            self._prefilling.add(task)
            task.add_done_callback(self._prefilling.discard)

    async def _prefill_quietly(self, context: list[dict[str, Any]]) -> None:
        try:
            await self._prefill(context, wait=False, **HINT)
        except (openai.OpenAIError, RuntimeError) as error:
            self._cannot_prefill(error)

    async def prefill(self, *, wait: bool = False) -> PrefillAhead:
        """Let the server prefill the context before a role is called; see `Session.prefill`."""
        return await self._prefill(self._context(), wait=wait)

    async def _prefill(
        self, context: list[dict[str, Any]], *, wait: bool, **request_options: Any
    ) -> PrefillAhead:
        headers = {**self.headers, SESSION_HEADER: self.id}
        options: Any = {"headers": headers, **request_options}
        answer = await self._connected().post(
            f"{self._path}/prefill",
            body={"messages": context, "wait": wait},
            cast_to=object,
            options=options,
        )
        return PrefillAhead.model_validate(answer)

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
    @overload
    async def chat(
        self,
        role: str,
        /,
        *,
        instructions: str | None = None,
        tools: Tools | None = None,
        stream: bool,
        **options: Any,
    ) -> ChatCompletion | AsyncChatStream: ...
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
        request, place = self._request(role, instructions, tools, {**options, "stream": stream})
        await self._asked()
        prompt = await acount_if_needed(self, self._connected(), request)
        request, hold = self._admit(role, request, prompt)
        started = time.perf_counter()
        try:
            with _context.no_session():  # Checked and counted here.
                source: Any = await self._connected().chat.completions.create(**request)
            if not stream:
                wall_s = time.perf_counter() - started
                self._finish_completion(place, hold, role, source, wall_s)
        except BaseException:
            hold.release()
            raise
        if stream:
            return AsyncChatStream(
                source,
                StreamedAnswer(role, started),
                finish=partial(self._finish, place, hold),
                over=hold.release,
            )
        completion: ChatCompletion = source
        return completion

    async def _asked(self) -> None:
        if self._prefilling:
            await asyncio.wait(self._prefilling)

    async def count_tokens(
        self,
        role: str,
        /,
        *,
        instructions: str | None = None,
        tools: Tools | None = None,
        **options: Any,
    ) -> int:
        """Return how many prompt tokens `chat` with these arguments would have."""
        request, _ = self._request(role, instructions, tools, options)
        return await acount(self, self._connected(), request)

    def fork(self, id: str | None = None) -> AsyncSession:
        """Return a session that starts from this one's context and goes its own way.

        Both share the prefill of what they have in common. It uses this session's client.
        """
        branch = AsyncSession(id, client=self._client, messages=self.messages, **self._options)
        branch._become_fork_of(self)
        return branch

    async def merge(self, branch: AsyncSession, summary: str | Message | None = None) -> None:
        """Take over the result of a fork and end it; see `Session.merge`."""
        self._take(branch, summary)
        await branch.close()

    async def save(self, path: str | os.PathLike[str]) -> None:
        """Write id, context and call records to a JSON file; see `Session.save`."""
        await asyncio.to_thread(_saved.write, self._saved(), path)

    @classmethod
    async def load(cls, path: str | os.PathLike[str], **options: Unpack[AsyncLoadOptions]) -> Self:
        """Return the session that `save` wrote; see `Session.load`."""
        saved = await asyncio.to_thread(_saved.read, path)
        settings: Any = {**saved.options, **options}
        return cls(saved.id, messages=saved.messages, **settings)._resume(saved)

    async def totals(self) -> SessionTotals:
        """Ask the server for its ledger. Raises openai.NotFoundError before the first call."""
        return SessionTotals.model_validate(await self._connected().get(self._path, cast_to=object))

    async def explain(self) -> Report:
        """Ask the server where prompts stopped sharing, and why; see `Session.explain`."""
        from prefillshare_prefix import Report

        answer: Any = await self._connected().get(f"{self._path}/calls", cast_to=object)
        return Report.of_calls(answer["data"], self.id)

    async def close(self) -> None:
        """End the session on the server, freeing what it holds there. Does nothing if ended.

        Raises what openai's client raises; then it takes no more chats but can be closed again.
        """
        if self._ended:
            return
        await self._asked()
        self._closed = True
        if self._client is not None:
            self._require_client(self._client, f"close {self.id!r} before it")
            with suppress(openai.NotFoundError):  # never used, or already expired there
                await self._client.delete(self._path, cast_to=object)
            if self._owns_client:
                await self._client.close()
        self._ended = True
        _prefix_watch.forget(self.id)

    def _connected(self) -> openai.AsyncOpenAI:
        self._require_client(self._client)
        assert self._client is not None
        return self._client

    async def __aenter__(self) -> Self:
        _context.enter_block(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        _context.leave_block(self)
