"""Retries with one owner.

openai's client tries a request again, LangGraph's `RetryPolicy` tries the node again, and together
they make nine requests where three were meant. So an error that the client has retried already, or
knows to be in vain, becomes one that LangGraph's default policy does not retry: a RuntimeError too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import openai
from langgraph.types import RetryPolicy

from .._retries import settle

TRANSIENT = (
    openai.APIConnectionError,
    openai.ConflictError,
    openai.RateLimitError,
    openai.InternalServerError,
)
"""What may go away by itself; openai's client retries these (and timeouts, which are of them)."""

_DEFAULT: Any = RetryPolicy().retry_on

_owned: ContextVar[bool] = ContextVar("prefillshare_retries_owned", default=False)


def retried_outside() -> bool:
    """Return whether a `with_retry` around the caller owns the retries."""
    return _owned.get()


@contextmanager
def retries_owned() -> Iterator[None]:
    """Own the retries of the block: its clients make none, and its errors are retried already."""
    token = _owned.set(True)
    try:
        yield
    except openai.APIError as error:
        settle(error)
        raise
    finally:
        _owned.reset(token)


@contextmanager
def retried_by(client: openai.OpenAI | openai.AsyncOpenAI | None) -> Iterator[None]:
    """Mark openai's errors of the block as ones that `client` has retried or knows to be in vain.

    They keep their class and become a RuntimeError too. Nothing changes if the client does not
    retry (`max_retries=0`): then the policy is the owner.
    """
    try:
        yield
    except openai.APIError as error:
        if client is not None and client.max_retries > 0 and not retried_outside():
            settle(error)
        raise


def worth_retrying(error: Exception) -> bool:
    """Return whether a node that failed with `error` should be tried again.

    >>> graph.add_node("critic", node, retry_policy=RetryPolicy(retry_on=worth_retrying))

    True for errors that may go away and that no client has retried yet. Errors of other origin
    are judged as by LangGraph's default.
    """
    if isinstance(error, openai.APIError):
        return isinstance(error, TRANSIENT) and not isinstance(error, RuntimeError)
    # A stream that broke off is of openai's root class: retried by no client, and by the default.
    return bool(_DEFAULT(error))
