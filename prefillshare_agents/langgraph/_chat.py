"""A LangChain chat model whose calls belong to a session."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Self

import openai
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool
from langchain_openai import ChatOpenAI
from pydantic import ConfigDict, Field, SecretStr, model_validator

from .. import AsyncSession, Session
from .._counting import tokenized
from .._prefix_watch import OnPrefixBreak
from ._bindings import EagerBinding, MakesBindings
from ._call import Call
from ._canonical import settle_ids, tool_name
from ._chat_only import refuse_responses_api
from ._clients import (
    GraphAsyncOpenAI,
    GraphOpenAI,
    agent_name,
    as_session,
    groups_runs,
    session_of_call,
)
from ._retry import retried_by
from ._structured import as_extra_body, is_typed
from ._transport import address, http_clients, keys, refuse_socket_options
from ._wire import annotate, recorded_calls, restore
from ._within import awithin, entered, within


class ChatPrefillShare(MakesBindings[LanguageModelInput, AIMessage], ChatOpenAI):
    """`ChatOpenAI` for a PrefillShare server: `model` is a role of its cluster.

    >>> critic = ChatPrefillShare(model="critic", base_url="http://127.0.0.1:8000/v1")

    The session of a call is the first that exists of: a session header in `default_headers`,
    `session=`, the `with session:` block, the graph's `context`, `configurable`
    ["prefillshare_session"], a hash of `configurable["thread_id"]`, where `configurable` is that
    of the call's own config or of the graph around it; otherwise it has none.
    Answers carry the server's account of the call in `response_metadata["prefillshare"]` and
    cached tokens in `usage_metadata`, streaming included; a `Session` object counts its calls.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    session: Session | AsyncSession | str | None = Field(default=None, exclude=True)
    """Fixed session of all calls of this model."""
    role: str | None = Field(default=None, exclude=True)
    """Name under which a session counts the calls; the model's name if None. Never sent."""
    speakers: bool = Field(default=True, exclude=True)
    """Tell the role which answers in the context are other roles' (behind the conversation). False
    for roles that were trained without it."""
    on_prefix_break: OnPrefixBreak = Field(default="warn", exclude=True)
    """What happens when a call does not extend what its session sent before; see `OpenAI`. Settled
    when the model is made."""
    sort_tools: bool = Field(default=True, exclude=True)
    """Send bound tools in the order of their names, whatever order a framework's set had."""

    # The parent turns to /v1/responses for some model names, and drops usage from streams
    # whenever base_url is given.
    use_responses_api: bool | None = False
    stream_usage: bool | None = True

    @model_validator(mode="after")
    def validate_environment(self) -> Self:
        """Build this package's clients where the parent's validator would build openai's.

        Raises ValueError if no address is known, and for a proxy beside clients of one's own.
        """
        refuse_responses_api(vars(self))
        given = self.openai_api_base
        # As the parent reads them.
        self.openai_api_base = given or os.getenv("OPENAI_API_BASE") or None
        if self.openai_api_key is None and (found := os.getenv("OPENAI_API_KEY")):
            self.openai_api_key = SecretStr(found)
        if self.client and self.async_client:
            return self
        refuse_socket_options(self.http_socket_options)
        key, async_key = keys(self.openai_api_key or "local")
        http_client, http_async_client = http_clients(
            self.openai_proxy, self.http_client, self.http_async_client
        )
        options: dict[str, Any] = {
            "base_url": address(given, self.client, self.async_client),
            "organization": self.openai_organization,
            "timeout": self.request_timeout,
            "default_headers": self.default_headers,
            "default_query": self.default_query,
            "on_prefix_break": self.on_prefix_break,
        }
        if self.max_retries is not None:
            options["max_retries"] = self.max_retries
        if not self.client:
            self.root_client = GraphOpenAI(api_key=key, http_client=http_client, **options)
            self.client = self.root_client.chat.completions
        if not self.async_client:
            self.root_async_client = GraphAsyncOpenAI(
                api_key=async_key, http_client=http_async_client, **options
            )
            self.async_client = self.root_async_client.chat.completions
        return self

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Where LangChain's `load` finds this class."""
        return ["prefillshare_agents", "langgraph"]

    def _resolve_model_profile(self) -> ModelProfile:
        # `create_agent` asks here whether answers can be held to a schema. The parent looks the
        # name up in a list of OpenAI's models.
        return {
            "structured_output": True,
            "tool_calling": True,
            "tool_choice": True,
            "text_inputs": True,
            "text_outputs": True,
        }

    @property
    def _llm_type(self) -> str:
        return "prefillshare-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        params = {**super()._get_ls_params(stop=stop, **kwargs), "ls_provider": "prefillshare"}
        session = as_session(self.session) or session_of_call(None)
        # A run that has one already is grouped as its user wants it.
        return params if session is None or groups_runs() else {**params, "session_id": session.id}

    def get_token_ids(self, text: str) -> list[int]:
        """Ask the server for the tokens of a text. Raises what openai's client raises."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        body = {"model": self.model_name, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in tokenized(self.root_client, body)["tokens"]]

    def get_num_tokens_from_messages(
        self,
        messages: Sequence[BaseMessage],
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool] | None = None,
        **_: Any,
    ) -> int:
        """Ask the server how many prompt tokens a call with these messages and tools has.

        Waits for the answer; in a coroutine, call it through `asyncio.to_thread`. Raises what
        openai's client raises.
        """
        options = self.bind_tools(tools).kwargs if tools else {}  # type: ignore[attr-defined]
        body = self._get_request_payload(list(messages), **options)
        with entered(as_session(self.session)):
            return int(tokenized(self.root_client, body)["count"])

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """As the parent's; the tools are sent in the order of their names (`sort_tools`)."""
        ordered = sorted(tools, key=tool_name) if self.sort_tools else tools
        bound: Any = super().bind_tools(
            ordered,
            tool_choice=tool_choice,
            strict=strict,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
            **kwargs,
        )
        return EagerBinding(bound=self, kwargs=bound.kwargs)

    def with_structured_output(
        self, *args: Any, **kwargs: Any
    ) -> Runnable[LanguageModelInput, Any]:
        """As the parent's; its streams and retries are those of the model."""
        return EagerBinding(bound=super().with_structured_output(*args, **kwargs))

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """As the parent's; a stream made inside `with session:` may be read after the block."""
        return super().stream(input, config, **kwargs)

    def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        """Async twin of `stream`."""
        return super().astream(input, config, **kwargs)

    def stream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """As the parent's; keeps the session as `stream` does."""
        if kwargs.get("version") != "v3":
            return super().stream_events(input, config, **kwargs)
        return ChatOpenAI.stream_events(self._fixed(config), input, config, **kwargs)

    def astream_events(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Any:
        """Async twin of `stream_events`."""
        if kwargs.get("version") != "v3":
            return super().astream_events(input, config, **kwargs)
        return ChatOpenAI.astream_events(self._fixed(config), input, config, **kwargs)

    def _fixed(self, config: RunnableConfig | None) -> Self:
        """Return the model for a stream that is an object, and read through no iterator."""
        return self.model_copy(update={"session": self.session or session_of_call(config)})

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        payload: dict[str, Any] = super()._get_request_payload(input_, stop=stop, **kwargs)
        refuse_responses_api(payload)
        messages = self._convert_input(input_).to_messages()
        own_names = {self.role, self.model_name, agent_name()}
        if not self.speakers:
            own_names |= {message.name for message in messages}
        restore(payload["messages"], messages, own_names)
        generated = {call["id"] for message in messages for call in recorded_calls(message)}
        settle_ids(payload["messages"], generated)
        as_extra_body(payload)
        return payload

    def _create_chat_result(
        self,
        response: dict[str, Any] | openai.BaseModel,
        generation_info: dict[str, Any] | None = None,
    ) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        # Without warnings: pydantic does not expect the parsed object of a `.parse()` result.
        body: dict[str, Any] = (
            response if isinstance(response, dict) else response.to_dict(warnings=False)
        )
        for generation, choice in zip(result.generations, body["choices"], strict=True):
            annotate(generation.message, body, choice["message"])
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
            choices = chunk.get("choices") or [{}]
            annotate(generation.message, chunk, choices[0].get("delta") or {})
        return generation

    @property
    def _counted_as(self) -> str:
        return self.role or self.model_name

    def _call(self, options: dict[str, Any]) -> Call:
        options = {**self.model_kwargs, **options}
        return Call(
            self._counted_as,
            options.get("model") or self.model_name,
            typed=is_typed(options.get("response_format")),
        )

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        with entered(as_session(self.session), self._counted_as):
            call = self._call(kwargs)
            with retried_by(self.root_client):
                result = super()._generate(messages, *args, **kwargs)
        call.finish(result)
        return result

    async def _agenerate(
        self, messages: list[BaseMessage], *args: Any, **kwargs: Any
    ) -> ChatResult:
        with entered(as_session(self.session), self._counted_as):
            call = self._call(kwargs)
            with retried_by(self.root_async_client):
                result = await super()._agenerate(messages, *args, **kwargs)
        call.finish(result)
        return result

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        """Raises openai.OpenAIError if the stream is cut short: half an answer is none."""
        return within(as_session(self.session), self._followed(*args, **kwargs), self._counted_as)

    def _followed(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        call = self._call(kwargs)
        with retried_by(self.root_client):
            for chunk in super()._stream(*args, **kwargs):
                call.saw(chunk)
                yield chunk
        call.finish_stream()

    def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        """Async twin of `_stream`."""
        answer = self._afollowed(*args, **kwargs)
        return awithin(as_session(self.session), answer, self._counted_as)

    async def _afollowed(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        call = self._call(kwargs)
        with retried_by(self.root_async_client):
            async for chunk in super()._astream(*args, **kwargs):
                call.saw(chunk)
                yield chunk
        call.finish_stream()
