"""Options that are passed on, by name: a misspelt one is an error of the type checker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict

import openai

from ._limits import ContextWindow
from ._prefix_watch import OnPrefixBreak
from ._transcript import Message


class _SharedOptions(TypedDict, total=False):
    """What two clients of one server, a synchronous and an asynchronous one, can both be given."""

    admin_api_key: str | None
    workload_identity: Any
    organization: str | None
    project: str | None
    webhook_secret: str | None
    provider: Any
    data_residency: Any
    websocket_base_url: Any
    timeout: float | openai.Timeout | openai.NotGiven | None
    max_retries: int
    default_headers: Mapping[str, str] | None
    default_query: Mapping[str, object] | None
    _strict_response_validation: bool
    _enforce_credentials: bool


class ClientOptions(_SharedOptions, total=False):
    """Options of `openai.OpenAI` and `openai.AsyncOpenAI`."""

    api_key: str | Callable[[], Any] | None
    base_url: Any  # a text or a URL of either httpx
    http_client: Any


class TeamOptions(_SharedOptions, total=False):
    """Options of both clients of a `Team`."""

    on_prefix_break: OnPrefixBreak


class _Settings(TypedDict, total=False):
    mode: Literal["share", "isolate"]
    speakers: bool
    prefill: bool
    token_budget: int | None
    context_window: ContextWindow


class SessionOptions(_Settings, total=False):
    """Options of `Session` and `AsyncSession` beside where they are served."""

    messages: Iterable[Message]


class LoadOptions(_Settings, total=False):
    """Options of `Session.load`; the messages are those in the file."""

    client: openai.OpenAI | None
    base_url: str | None
    api_key: str


class AsyncLoadOptions(_Settings, total=False):
    """Options of `AsyncSession.load`; the messages are those in the file."""

    client: openai.AsyncOpenAI | None
    base_url: str | None
    api_key: str
