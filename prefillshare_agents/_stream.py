"""A streamed answer: chunks as they come, one message when the stream has ended."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, Self

import openai
from openai import AsyncStream, Stream
from openai.types.chat import ChatCompletionChunk

from ._records import CallRecord
from ._transcript import answer_of


def cut_short(role: str) -> openai.OpenAIError:
    """Return the error for a stream of `role` that ended without a finish_reason."""
    return openai.OpenAIError(
        f"the stream of role {role!r} ended without a finish_reason: the connection "
        "was lost; the part received is not kept, call again"
    )


class StreamedAnswer:
    """Collects the chunks of one answer. Not thread-safe: one stream has one reader."""

    def __init__(self, role: str, started: float) -> None:
        """`started`: `time.perf_counter()` when the request was about to be sent."""
        self.role = role
        self._started = started
        self._ttft_s: float | None = None
        self._message: dict[str, Any] = {}
        self._tool_calls: dict[int, dict[str, Any]] = {}
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] | None = None
        self._extra: dict[str, Any] | None = None

    def add(self, chunk: ChatCompletionChunk) -> None:
        if chunk.usage is not None:
            self._usage = chunk.usage.to_dict()
        self._extra = (chunk.model_extra or {}).get("prefillshare") or self._extra
        for choice in chunk.choices or ():
            self._finish_reason = choice.finish_reason or self._finish_reason
            self._add_delta(choice.delta.to_dict())

    @property
    def is_whole(self) -> bool:
        """Whether the server has said why the answer ends."""
        return self._finish_reason is not None

    def _add_delta(self, delta: dict[str, Any]) -> None:
        for part in delta.pop("tool_calls", None) or ():
            self._add_tool_call(dict(part))
        for name, value in delta.items():
            if isinstance(value, str) and name != "role":
                self._message[name] = self._message.get(name, "") + value
                self._saw(value)

    def _add_tool_call(self, part: dict[str, Any]) -> None:
        call = self._tool_calls.setdefault(
            part.pop("index"), {"id": None, "type": "function", "function": {}}
        )
        function = call["function"]
        for name, value in (part.pop("function", None) or {}).items():
            if isinstance(value, str):
                function[name] = function.get(name, "") + value
                self._saw(value)
        call.update({name: value for name, value in part.items() if value is not None})

    def _saw(self, text: str) -> None:
        if text and self._ttft_s is None:
            self._ttft_s = time.perf_counter() - self._started

    def message(self) -> dict[str, Any]:
        """Return the whole answer. Raises openai.OpenAIError if the stream was cut short."""
        if not self.is_whole:
            raise cut_short(self.role)
        calls = [self._tool_calls[index] for index in sorted(self._tool_calls)]
        return answer_of({**self._message, "tool_calls": calls})

    def record(self) -> CallRecord:
        return CallRecord.of(
            self.role,
            usage=self._usage,
            extra=self._extra,
            finish_reason=self._finish_reason,
            wall_s=time.perf_counter() - self._started,
            ttft_s=self._ttft_s,
        )


class ChatStream:
    """Iterator over the chunks of `session.chat(..., stream=True)`.

    When the last chunk has been read, the answer joins the session's context. A stream that is
    closed before, or fails, leaves the context as it was.
    """

    def __init__(
        self,
        source: Stream[ChatCompletionChunk],
        answer: StreamedAnswer,
        *,
        finish: Callable[[dict[str, Any], CallRecord], None],
        over: Callable[[], None],
    ) -> None:
        """`finish` gets the whole answer; `over` is called when no more of it will come, at least
        once, and does not hold this stream."""
        self._source = source
        self._answer = answer
        self._finish = finish
        self._over = over
        self._finished = False
        # One that is dropped half read is closed by nobody.
        weakref.finalize(self, over).atexit = False

    def _end(self) -> None:
        if not self._finished:
            self._finished = True
            self._over()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ChatCompletionChunk:
        if self._finished:
            raise StopIteration
        try:
            chunk = next(self._source)
        except StopIteration:
            self._finished = True
            try:
                self._finish(self._answer.message(), self._answer.record())
            finally:
                self._over()
            raise
        except BaseException:
            self._end()
            raise
        self._answer.add(chunk)
        return chunk

    def close(self) -> None:
        """Stop the generation and free the connection."""
        self._end()
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncChatStream:
    """The async twin of `ChatStream`."""

    def __init__(
        self,
        source: AsyncStream[ChatCompletionChunk],
        answer: StreamedAnswer,
        *,
        finish: Callable[[dict[str, Any], CallRecord], None],
        over: Callable[[], None],
    ) -> None:
        """`finish` gets the whole answer; `over` is called when no more of it will come, at least
        once, and does not hold this stream."""
        self._source = source
        self._answer = answer
        self._finish = finish
        self._over = over
        self._finished = False
        # One that is dropped half read is closed by nobody.
        weakref.finalize(self, over).atexit = False

    def _end(self) -> None:
        if not self._finished:
            self._finished = True
            self._over()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChatCompletionChunk:
        if self._finished:
            raise StopAsyncIteration
        try:
            chunk = await anext(self._source)
        except StopAsyncIteration:
            self._finished = True
            try:
                self._finish(self._answer.message(), self._answer.record())
            finally:
                self._over()
            raise
        except BaseException:
            self._end()
            raise
        self._answer.add(chunk)
        return chunk

    async def close(self) -> None:
        """Stop the generation and free the connection."""
        self._end()
        await self._source.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
