"""A LangChain chat model whose calls belong to a session."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import openai
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_openai import ChatOpenAI
from pydantic import ConfigDict, Field, SecretStr, model_validator

from .. import AsyncSession, CallRecord, Session
from .._stream import cut_short
from ._clients import GraphAsyncOpenAI, GraphOpenAI, session_to_record
from ._wire import ARGUMENTS, generated_arguments, restore


class ChatPrefillShare(ChatOpenAI):
    """`ChatOpenAI` for a PrefillShare server: `model` is a role of its cluster.

    >>> critic = ChatPrefillShare(model="critic", base_url="http://127.0.0.1:8000/v1")

    The session of a call is the first that exists of: a session header in `default_headers`,
    `session=`, the `with session:` block, the graph's `context`, `configurable`
    ["prefillshare_session"], a hash of `configurable["thread_id"]`; otherwise it has none.
    Answers carry the server's account of the call in `response_metadata["prefillshare"]` and
    cached tokens in `usage_metadata`, streaming included; a `Session` object counts its calls.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    session: Session | AsyncSession | str | None = Field(default=None, exclude=True)
    """Fixed session of all calls of this model."""
    role: str | None = Field(default=None, exclude=True)
    """Name under which a session counts the calls; the model's name if None. Never sent."""

    # The parent turns to /v1/responses for some model names, and drops usage from streams
    # whenever base_url is given.
    use_responses_api: bool | None = False
    stream_usage: bool | None = True

    @model_validator(mode="after")
    def validate_environment(self) -> Self:
        """Build this package's clients where the parent's validator would build openai's.

        Proxies and other transport settings come by `http_client=` and `http_async_client=`.
        """
        key = self.openai_api_key
        api_key: Any = key.get_secret_value() if isinstance(key, SecretStr) else key or "local"
        options: dict[str, Any] = {
            "api_key": api_key,
            "base_url": self.openai_api_base,
            "organization": self.openai_organization,
            "timeout": self.request_timeout,
            "default_headers": self.default_headers,
            "default_query": self.default_query,
            "session": self.session,
        }
        if self.max_retries is not None:
            options["max_retries"] = self.max_retries
        if not self.client:
            self.root_client = GraphOpenAI(http_client=self.http_client, **options)
            self.client = self.root_client.chat.completions
        if not self.async_client:
            self.root_async_client = GraphAsyncOpenAI(http_client=self.http_async_client, **options)
            self.async_client = self.root_async_client.chat.completions
        return self

    @property
    def _llm_type(self) -> str:
        return "prefillshare-chat"

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        payload: dict[str, Any] = super()._get_request_payload(input_, stop=stop, **kwargs)
        messages = self._convert_input(input_).to_messages()
        for wire, message in zip(payload["messages"], messages, strict=True):
            restore(wire, message)
        return payload

    def _create_chat_result(
        self,
        response: dict[str, Any] | openai.BaseModel,
        generation_info: dict[str, Any] | None = None,
    ) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        body: dict[str, Any] = response if isinstance(response, dict) else response.to_dict()
        for generation, choice in zip(result.generations, body["choices"], strict=True):
            _annotate(generation.message, body, choice["message"])
        return result

    def _convert_chunk_to_generation_chunk(
        self,
        chunk: dict[str, Any],
        default_chunk_class: type,
        base_generation_info: dict[str, Any] | None,
    ) -> ChatGenerationChunk | None:
        generation = super()._convert_chunk_to_generation_chunk(
            chunk, default_chunk_class, base_generation_info
        )
        if generation is not None:
            # openai's `.stream()` helper wraps each chunk in an event.
            body = chunk.get("chunk") or chunk
            choices = body.get("choices") or [{}]
            _annotate(generation.message, body, choices[0].get("delta") or {})
        return generation

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        call = _Call(self)
        result = super()._generate(messages, *args, **kwargs)
        call.finish(result)
        return result

    async def _agenerate(
        self, messages: list[BaseMessage], *args: Any, **kwargs: Any
    ) -> ChatResult:
        call = _Call(self)
        result = await super()._agenerate(messages, *args, **kwargs)
        call.finish(result)
        return result

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        """Raises openai.OpenAIError if the stream is cut short: half an answer is none."""
        call = _Call(self)
        for chunk in super()._stream(*args, **kwargs):
            call.saw(chunk)
            yield chunk
        call.finish_stream()

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        """Async twin of `_stream`."""
        call = _Call(self)
        async for chunk in super()._astream(*args, **kwargs):
            call.saw(chunk)
            yield chunk
        call.finish_stream()


def _annotate(message: BaseMessage, body: dict[str, Any], wire: dict[str, Any]) -> None:
    """Keep what LangChain drops: the server's account, and the bytes of tool arguments."""
    if body.get("prefillshare"):
        message.response_metadata["prefillshare"] = body["prefillshare"]
    if wire.get("tool_calls"):
        message.additional_kwargs[ARGUMENTS] = generated_arguments(wire["tool_calls"])


class _Call:
    """One call under way, to be counted in the session that is current when it starts."""

    def __init__(self, model: ChatPrefillShare) -> None:
        self._role = model.role or model.model_name
        # A caller that gives client= need not give root_client= as well.
        headers = model.root_client.default_headers if model.root_client else model.default_headers
        self._session = session_to_record(model.session, headers or {})
        self._started = time.perf_counter()
        self._ttft_s: float | None = None
        self._usage: dict[str, Any] = {}
        self._metadata: dict[str, Any] = {}

    def saw(self, chunk: ChatGenerationChunk) -> None:
        message = chunk.message
        generated = bool(message.content) or bool(getattr(message, "tool_call_chunks", None))
        if generated and self._ttft_s is None:
            self._ttft_s = time.perf_counter() - self._started
        self._keep(message, chunk.generation_info)

    def finish(self, result: ChatResult) -> None:
        for generation in result.generations:
            self._keep(generation.message, generation.generation_info)
        self._record()

    def finish_stream(self) -> None:
        """Raise openai.OpenAIError unless the answer is whole."""
        # Without this, LangChain would take the pieces of a lost tool call for a whole one.
        if not self._metadata.get("finish_reason"):
            raise cut_short(self._role)
        self._record()

    def _record(self) -> None:
        if self._session is None:
            return
        details = self._usage.get("input_token_details") or {}
        self._session.record(
            CallRecord.of(
                self._role,
                usage={
                    "prompt_tokens": self._usage.get("input_tokens"),
                    "completion_tokens": self._usage.get("output_tokens"),
                    "prompt_tokens_details": {"cached_tokens": details.get("cache_read")},
                },
                extra=self._metadata.get("prefillshare"),
                finish_reason=self._metadata.get("finish_reason"),
                wall_s=time.perf_counter() - self._started,
                ttft_s=self._ttft_s,
            )
        )

    def _keep(self, message: BaseMessage, info: dict[str, Any] | None) -> None:
        if isinstance(message, AIMessage) and message.usage_metadata:
            self._usage = dict(message.usage_metadata)
        self._metadata.update(message.response_metadata)
        self._metadata.update(info or {})
