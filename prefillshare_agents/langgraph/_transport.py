"""How a model's two clients reach the server: the address, a key for each, the way by a proxy."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import openai
from pydantic import SecretStr

_CLIENT_OPTIONS = {
    "timeout": "timeout",
    "request_timeout": "timeout",
    "max_retries": "max_retries",
    "default_headers": "default_headers",
    "default_query": "default_query",
    "base_url": "base_url",
    "openai_api_base": "base_url",
    "on_prefix_break": "on_prefix_break",
    "organization": "organization",
    "openai_organization": "organization",
}
"""Options of a chat model that act through its client → their names there."""


def client_options(model_options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what in `model_options` is for the synchronous and for the asynchronous client."""
    options = {
        _CLIENT_OPTIONS[name]: value
        for name, value in model_options.items()
        # None means "as the team has it", but for timeouts it means "no limit".
        if name in _CLIENT_OPTIONS and (value is not None or name.endswith("timeout"))
    }
    key, async_key = keys(model_options.get("api_key") or model_options.get("openai_api_key"))
    http_client, http_async_client = http_clients(
        model_options.get("openai_proxy"),
        model_options.get("http_client"),
        model_options.get("http_async_client"),
    )
    return (
        {**options, "api_key": key, "http_client": http_client},
        {**options, "api_key": async_key, "http_client": http_async_client},
    )


def address(base_url: str | None, *clients: Any) -> str:
    """Return where a model's client is to send: `base_url`, else where its other one sends.

    Then what the environment says. Raises ValueError if nothing does: openai's default is
    api.openai.com, and prompts would go there unnoticed.
    """
    others = (getattr(getattr(client, "_client", None), "base_url", None) for client in clients)
    known = base_url or next((str(other) for other in others if other is not None), None)
    found = known or os.getenv("OPENAI_API_BASE") or os.getenv("OPENAI_BASE_URL")
    if not found:
        raise ValueError(
            "base_url is not given, and prompts would go to api.openai.com: give the server's "
            "address, base_url='http://127.0.0.1:8000/v1', or set OPENAI_BASE_URL"
        )
    return found


def keys(api_key: Any) -> tuple[Any, Any]:
    """Return the API key of the synchronous and of the asynchronous client.

    A function is asked with each request, a plain one in a thread where it would hold up the event
    loop. What is asked of an async one raises ValueError in synchronous calls.
    """
    if isinstance(api_key, SecretStr):
        api_key = api_key.get_secret_value()
    return (_asked(api_key), _awaited(api_key)) if callable(api_key) else (api_key, api_key)


def _asked(function: Callable[[], Any]) -> Callable[[], Any]:
    def ask() -> Any:
        found = function()
        if inspect.isawaitable(found):
            if inspect.iscoroutine(found):
                found.close()  # Python warns of one that nobody awaits.
            raise ValueError(
                f"api_key is the async function {getattr(function, '__name__', function)!r}, and "
                "the call is a synchronous one: use ainvoke, astream or abatch, or give a plain "
                "function or a text"
            )
        return found

    return ask


def _awaited(function: Callable[[], Any]) -> Callable[[], Any]:
    async def ask() -> Any:
        if inspect.iscoroutinefunction(function):
            return await function()
        found = await asyncio.to_thread(function)
        return await found if inspect.isawaitable(found) else found

    return ask


def http_clients(proxy: str | None, client: Any, async_client: Any) -> tuple[Any, Any]:
    """Return what the two clients send through: those given, or new ones to the proxy.

    Raises ValueError if there are both.
    """
    if not proxy:
        return client, async_client
    if client is not None or async_client is not None:
        # Without its value: it may have a password in it.
        raise ValueError(
            "openai_proxy, or OPENAI_PROXY in the environment, is given beside http_client= or "
            "http_async_client=: give the proxy to both of these, and no openai_proxy"
        )
    return openai.DefaultHttpxClient(proxy=proxy), openai.DefaultAsyncHttpxClient(proxy=proxy)


def refuse_socket_options(options: object) -> None:
    """Raise ValueError if a model has socket options, which its clients would not have."""
    if options:
        raise ValueError(
            f"http_socket_options is {options!r}; give http_client= and http_async_client= whose "
            "transports have them"
        )
