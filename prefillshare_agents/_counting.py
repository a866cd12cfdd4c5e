"""Prompt tokens as the server counts them: for `session.chat`, and for clients in a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai

from ._core import SessionCore


def count(
    session: SessionCore, client: openai.OpenAI, body: Mapping[str, Any], **options: Any
) -> int:
    """Return the prompt tokens of a chat request. Raises what openai's client raises."""
    return session._has_counted(tokenized(client, body, **options))


def tokenized(client: openai.OpenAI, body: Mapping[str, Any], **options: Any) -> Any:
    """Return the server's answer for a chat request, or a `prompt`: `count` and `tokens`."""
    return client.post(
        _url(client), body=_request(body), cast_to=object, options=_options(body, options)
    )


async def acount(
    session: SessionCore, client: openai.AsyncOpenAI, body: Mapping[str, Any], **options: Any
) -> int:
    """Async twin of `count`."""
    answer = await client.post(
        _url(client), body=_request(body), cast_to=object, options=_options(body, options)
    )
    return session._has_counted(answer)


def count_if_needed(
    session: SessionCore, client: openai.OpenAI, body: Mapping[str, Any], **options: Any
) -> int | None:
    """Return the prompt tokens of a request that may be too long; None for others."""
    if not session._needs_count(body):
        return None
    try:
        # Asked once: the call that follows has retries of its own.
        return count(session, client, body, max_retries=0, **options)
    except openai.APIError as error:
        # The call itself may work, and says better what is wrong with it if not.
        session._cannot_count(error)
        return None


async def acount_if_needed(
    session: SessionCore, client: openai.AsyncOpenAI, body: Mapping[str, Any], **options: Any
) -> int | None:
    """Async twin of `count_if_needed`."""
    if not session._needs_count(body):
        return None
    try:
        return await acount(session, client, body, max_retries=0, **options)
    except openai.APIError as error:
        session._cannot_count(error)
        return None


def _url(client: openai.OpenAI | openai.AsyncOpenAI) -> str:
    """Return the address of `/tokenize`: beside `/v1`, where vLLM has it."""
    return str(client.base_url).rstrip("/").removesuffix("/v1") + "/tokenize"


def _request(body: Mapping[str, Any]) -> dict[str, Any]:
    names = ("model", "messages", "prompt", "add_special_tokens", "tools", "chat_template_kwargs")
    merged = {**body, **(body.get("extra_body") or {})}
    return {name: merged[name] for name in names if name in merged}


def _options(body: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    given: dict[str, Any] = {"headers": body.get("extra_headers") or {}}
    if "timeout" in body:
        given["timeout"] = body["timeout"]
    if body.get("extra_query"):
        given["params"] = body["extra_query"]
    given.update(options)
    return {name: value for name, value in given.items() if not isinstance(value, openai.NotGiven)}
