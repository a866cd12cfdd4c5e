"""One call of a chat model under way: what it cost, for tracing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from .. import CallRecord
from .._stream import cut_short
from ._structured import PARSED, parsed
from ._telemetry import tell_span
from ._wire import REASONING


class Call:
    """Follows the answer through LangChain. What it cost its session, the client counts."""

    def __init__(self, role: str, model: str, *, typed: bool) -> None:
        """`typed`: the answer is JSON for a pydantic model."""
        self._role = role
        self._model = model
        self._typed = typed
        self._started = time.perf_counter()
        self._ttft_s: float | None = None
        self._text = ""
        self._usage: dict[str, Any] = {}
        self._metadata: dict[str, Any] = {}

    def saw(self, chunk: ChatGenerationChunk) -> None:
        """Take in a piece of a streamed answer; the one that ends a typed one gets its object."""
        message = chunk.message
        generated = (
            message.content
            or getattr(message, "tool_call_chunks", None)
            or message.additional_kwargs.get(REASONING)
        )
        if generated and self._ttft_s is None:
            self._ttft_s = time.perf_counter() - self._started
        self._keep(message, chunk.generation_info)
        self._text += chunk.text
        if self._typed and (chunk.generation_info or {}).get("finish_reason"):
            _add_parsed(message, self._text)

    def finish(self, result: ChatResult) -> None:
        for generation in result.generations:
            self._keep(generation.message, generation.generation_info)
            if self._typed:
                _add_parsed(generation.message, generation.text)
        self._tell()

    def finish_stream(self) -> None:
        """Raise openai.OpenAIError unless the answer is whole."""
        # Without this, LangChain would take the pieces of a lost tool call for a whole one.
        if not self._metadata.get("finish_reason"):
            raise cut_short(self._role)
        self._tell()

    def _tell(self) -> None:
        details = self._usage.get("input_token_details") or {}
        account: Mapping[str, Any] = self._metadata.get("prefillshare") or {}
        record = CallRecord.of(
            self._role,
            usage={
                "prompt_tokens": self._usage.get("input_tokens"),
                "completion_tokens": self._usage.get("output_tokens"),
                "prompt_tokens_details": {"cached_tokens": details.get("cache_read")},
            },
            extra=account,
            finish_reason=self._metadata.get("finish_reason"),
            wall_s=time.perf_counter() - self._started,
            ttft_s=self._ttft_s,
        )
        tell_span(record, self._model, account)

    def _keep(self, message: BaseMessage, info: dict[str, Any] | None) -> None:
        if isinstance(message, AIMessage) and message.usage_metadata:
            self._usage = dict(message.usage_metadata)
        self._metadata.update(message.response_metadata)
        self._metadata.update(info or {})


def _add_parsed(message: BaseMessage, text: str) -> None:
    if (value := parsed(text)) is not None:
        message.additional_kwargs[PARSED] = value
