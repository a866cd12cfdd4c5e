"""A plain `ChatOpenAI` that points at a PrefillShare server, as the model it should have been."""

from __future__ import annotations

import warnings
from typing import Any
from urllib.parse import urlsplit

import openai
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI

from ._chat import ChatPrefillShare
from ._chat_only import of_responses_api
from ._clients import GraphAsyncOpenAI, GraphOpenAI

_CLIENT_FIELDS = {
    *("client", "async_client", "root_client", "root_async_client"),
    *("http_client", "http_async_client", "use_responses_api"),
}
_OPENAIS = {"openai.com", "chatgpt.com"}


def adopted(model: BaseChatModel) -> ChatPrefillShare | None:
    """Return `model` as a `ChatPrefillShare` on the same connections; None if it is another kind.

    Only a plain `ChatOpenAI` with a `base_url` is: OpenAI's own servers are not to see the session.
    A subclass, which has ways of its own, one without openai's clients and one of the Responses
    API are let alone, with a warning.
    """
    if isinstance(model, ChatPrefillShare):
        return model
    if not isinstance(model, ChatOpenAI) or _is_openais(host := _host(model)):
        return None
    client, async_client = model.root_client, model.root_async_client
    if type(model) is not ChatOpenAI or client is None or async_client is None:
        why = (
            "a client or an async api_key of its own"
            if type(model) is ChatOpenAI
            else "a class of its own"
        )
        warnings.warn(
            f"model {model.model_name!r} at {host} is used as it is, without a session: it is a "
            f"{type(model).__name__} with {why}. If {host} is a PrefillShare server, give "
            "PrefillShareMiddleware(model=ChatPrefillShare(...))",
            stacklevel=2,
        )
        return None
    if found := of_responses_api(vars(model)):
        warnings.warn(
            f"model {model.model_name!r} is used as it is, without a session: {found} "
            "(it is of the Responses API; sessions need chat completions)",
            stacklevel=2,
        )
        return None
    ours = GraphOpenAI(**_options(client))
    async_ours = GraphAsyncOpenAI(**_options(async_client))
    fields = {name: getattr(model, name) for name in model.model_fields_set - _CLIENT_FIELDS}
    return ChatPrefillShare(
        **fields,
        root_client=ours,
        client=ours.chat.completions,
        root_async_client=async_ours,
        async_client=async_ours.chat.completions,
    )


def _host(model: ChatOpenAI) -> str:
    """Return the host that a model's calls go to."""
    client = model.root_client or model.root_async_client
    if client is not None:
        return client.base_url.host or ""
    return urlsplit(model.openai_api_base or "").hostname or ""


def _is_openais(host: str) -> bool:
    """Return whether it is one of OpenAI's, or not known: then it is OpenAI's by default."""
    return not host or host.endswith((".openai.com", ".chatgpt.com")) or host in _OPENAIS


def _options(client: openai.OpenAI | openai.AsyncOpenAI) -> dict[str, Any]:
    return {
        # A key given as a function is asked for anew with each request.
        "api_key": getattr(client, "_api_key_provider", None) or client.api_key,
        "organization": client.organization,
        "project": client.project,
        "base_url": client.base_url,
        "timeout": client.timeout,
        "max_retries": client.max_retries,
        "default_headers": client._custom_headers,
        "default_query": client._custom_query,
        "http_client": client._client,
    }
