"""Options that are passed on, by name: a misspelt one is an error of the type checker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict

import openai

from ._limits import ContextWindow
from ._transcript import Message


class ClientOptions(TypedDict, total=False):
    """Options of `openai.OpenAI` and `openai.AsyncOpenAI`."""

    api_key: str | Callable[[], Any] | None
    admin_api_key: str | None
    workload_identity: Any
    organization: str | None
    project: str | None
    webhook_secret: str | None
    provider: Any
    base_url: Any  # a text or a URL of either httpx
    data_residency: Any
    websocket_base_url: Any
    timeout: float | openai.Timeout | openai.NotGiven | None
    max_retries: int
    default_headers: Mapping[str, str] | None
    default_query: Mapping[str, object] | None
    http_client: Any
    _strict_response_validation: bool
    _enforce_credentials: bool


class SessionOptions(TypedDict, total=False):
    """Options of `Session` and `AsyncSession` beside where they are served."""

    messages: Iterable[Message]
    mode: Literal["share", "isolate"]
    speakers: bool
    prefill: bool
    token_budget: int | None
    context_window: ContextWindow
