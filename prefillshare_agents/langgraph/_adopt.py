"""A plain `ChatOpenAI` that points at a PrefillShare server, as the model it should have been."""

from __future__ import annotations

import warnings
from typing import Any

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


def adopted(model: BaseChatModel) -> ChatPrefillShare | None:
    """Return `model` as a `ChatPrefillShare` on the same connections; None if it is another kind.

    Only a plain `ChatOpenAI` with a `base_url` is: a subclass has ways of its own, and OpenAI's
    own servers are not to see the session. One of the Responses API is let alone, with a warning.
    """
    if isinstance(model, ChatPrefillShare):
        return model
    if type(model) is not ChatOpenAI:
        return None
    client, async_client = model.root_client, model.root_async_client
    if client is None or (client.base_url.host or "").endswith("openai.com"):
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
