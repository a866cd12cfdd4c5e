"""A session: one growing context that several roles read and answer in turn."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

import openai
from openai.types.chat import ChatCompletion

from . import _context, _prefix_watch, _saved
from ._client import OpenAI
from ._core import (
    HINT,
    Mode,
    SessionCore,
    Tools,
)
from ._counting import count, count_if_needed
from ._identity import SESSION_HEADER
from ._limits import ContextWindow
from ._options import LoadOptions
from ._records import PrefillAhead, SessionTotals
from ._stream import ChatStream, StreamedAnswer
from ._transcript import Message

if TYPE_CHECKING:
    from prefillshare_prefix import Report


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
        mode: Mode = "share",
        speakers: bool = True,
        prefill: bool = False,
        token_budget: int | None = None,
        context_window: ContextWindow = "auto",
    ) -> None:
        """Make a session, or join the one that has this `id` on the server.

        Calls go through `client`, or through an own one to `base_url`; a session without either
        can only be entered with `with`.

        `mode`: with "isolate" every role prefills for itself, to measure what sharing brings.
        `speakers`: tell a role which of the answers in the context are other roles'. The server
        writes it behind the conversation; False for roles that were trained without it.
        `prefill`: let the server prefill what is appended at once, before a role is called.
        `token_budget`: most prompt and completion tokens of all calls together.
        `context_window`: most tokens of one call; "auto" takes the server's own limit.
        Both hold for `chat`, and for clients of this package that have this object as session.
        """
        super().__init__(
            id,
            messages,
            mode=mode,
            speakers=speakers,
            prefill=prefill,
            token_budget=token_budget,
            context_window=context_window,
        )
        self._client = self._client_of(client, base_url, partial(OpenAI, api_key=api_key))

    def append(self, *messages: Message, prefill: bool | None = None) -> None:
        """Add messages to the context; it only ever grows.

        Takes dictionaries of the OpenAI API or message objects of a response. Raises ValueError
        naming the message that cannot stand where it would: an unknown role, a system message at
        the start, a malformed tool call, a tool result without its call. Then none is added.

        With `prefill` (default: the session's) the server starts at once to prefill what was
        added. That only saves time: if it cannot be done, a log message says so and the next call
        does it.
        """
        ahead = self._prefills_ahead(prefill)
        if ahead:
            self._connected()  # Raises before anything is added.
        self._transcript.append(messages)
        if ahead:
            self._prefill_quietly()

    def _prefill_quietly(self) -> None:
        try:
            self._prefill(self._context(), wait=False, **HINT)
        except (openai.OpenAIError, ValueError) as error:
            self._cannot_prefill(error)

    def prefill(self, *, wait: bool = False) -> PrefillAhead:
        """Let the server prefill the context before a role is called, a tool result for example.

        Returns when the server has begun, or with `wait` when it is done; a call that comes
        meanwhile waits for it there. Raises what openai's client raises.
        """
        return self._prefill(self._context(), wait=wait)

    def _prefill(
        self, context: list[dict[str, Any]], *, wait: bool, **request_options: Any
    ) -> PrefillAhead:
        headers = {**self.headers, SESSION_HEADER: self.id}
        options: Any = {"headers": headers, **request_options}
        answer = self._connected().post(
            f"{self._path}/prefill",
            body={"messages": context, "wait": wait},
            cast_to=object,
            options=options,
        )
        return PrefillAhead.model_validate(answer)

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
    @overload
    def chat(
        self,
        role: str,
        /,
        *,
        instructions: str | None = None,
        tools: Tools | None = None,
        stream: bool,
        **options: Any,
    ) -> ChatCompletion | ChatStream: ...
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
        when the stream has been read to its end. Raises ContextWindowError or TokenBudgetError
        before sending a call that has no room, and what openai's client raises; then the context
        is as before.
        """
        request, place = self._request(role, instructions, tools, {**options, "stream": stream})
        prompt = count_if_needed(self, self._connected(), request)
        request, hold = self._admit(role, request, prompt)
        started = time.perf_counter()
        try:
            with _context.no_session():  # Checked and counted here.
                source: Any = self._connected().chat.completions.create(**request)
            if not stream:
                wall_s = time.perf_counter() - started
                self._finish_completion(place, hold, role, source, wall_s)
        except BaseException:
            hold.release()
            raise
        if stream:
            return ChatStream(
                source,
                StreamedAnswer(role, started),
                finish=partial(self._finish, place, hold),
                over=hold.release,
            )
        completion: ChatCompletion = source
        return completion

    def count_tokens(
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
        return count(self, self._connected(), request)

    def fork(self, id: str | None = None) -> Session:
        """Return a session that starts from this one's context and goes its own way.

        Both share the prefill of what they have in common. It uses this session's client.
        """
        branch = Session(id, client=self._client, messages=self.messages, **self._options)
        branch._become_fork_of(self)
        return branch

    def merge(self, branch: Session, summary: str | Message | None = None) -> None:
        """Take over the result of a fork and end it.

        `summary` is appended to this context, a string as a user message; by default it is the
        branch's last answer. The branch's calls count here from now on. Raises ValueError if
        `branch` is no fork of this session or has no answer.
        """
        self._take(branch, summary)
        branch.close()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write id, context and call records to a JSON file. Raises OSError."""
        _saved.write(self._saved(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Unpack[LoadOptions]) -> Self:
        """Return the session that `save` wrote; `options` are those of the constructor.

        While the server still has the session, its prefilled context is found again. Raises
        OSError, or ValueError for a file that is no saved session.
        """
        saved = _saved.read(path)
        settings: Any = {**saved.options, **options}
        return cls(saved.id, messages=saved.messages, **settings)._resume(saved)

    def totals(self) -> SessionTotals:
        """Ask the server for its ledger. Raises openai.NotFoundError before the first call."""
        return SessionTotals.model_validate(self._connected().get(self._path, cast_to=object))

    def explain(self) -> Report:
        """Ask the server where consecutive prompts of this session stopped sharing, and why.

        `rich.print(session.explain())` shows it. Raises openai.NotFoundError before the first call.
        """
        from prefillshare_prefix import Report

        answer: Any = self._connected().get(f"{self._path}/calls", cast_to=object)
        return Report.of_calls(answer["data"], self.id)

    def close(self) -> None:
        """End the session on the server, freeing what it holds there. Does nothing if ended.

        Raises what openai's client raises; then it takes no more chats but can be closed again.
        """
        if self._ended:
            return
        self._closed = True
        if self._client is not None:
            self._require_client(self._client, f"close {self.id!r} before it")
            with suppress(openai.NotFoundError):  # never used, or already expired there
                self._client.delete(self._path, cast_to=object)
            if self._owns_client:
                self._client.close()
        self._ended = True
        _prefix_watch.forget(self.id)

    def _connected(self) -> openai.OpenAI:
        self._require_client(self._client)
        assert self._client is not None
        return self._client

    def __enter__(self) -> Self:
        _context.enter_block(self)
        return self

    def __exit__(self, *_: object) -> None:
        _context.leave_block(self)
