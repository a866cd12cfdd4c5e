"""The clients behind `ChatPrefillShare`: they also find the session in a running graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langgraph.config import get_config
from langgraph.runtime import Runtime, get_runtime

from .. import AsyncOpenAI, AsyncSession, OpenAI, Session, current_session
from .._client import session_id_of
from .._identity import names_session, session_id_of_thread, session_named_in

SESSION_KEY = "prefillshare_session"
"""Field of a graph's `context=`, or key of `config["configurable"]`, that names the session."""


def graph_session() -> Session | AsyncSession | str | None:
    """Return the session that the running graph names, or None; never a made-up one.

    The first that exists of: the run's `context`, `configurable["prefillshare_session"]`, a hash
    of `configurable["thread_id"]`. A thread's session is thus the same after a restart.
    """
    try:
        configurable = get_config().get("configurable") or {}
    except RuntimeError:  # not inside a graph
        return None
    named = _in_context() or configurable.get(SESSION_KEY)
    if named is not None and not isinstance(named, Session | AsyncSession | str):
        raise TypeError(f"{SESSION_KEY} is {named!r}; give a Session or its id")
    if named is None and configurable.get("thread_id") is not None:
        return session_id_of_thread(configurable["thread_id"])
    return named


def _in_context() -> Any:
    runtime: Runtime[Any] | None = get_runtime()  # None in a runnable outside any graph
    context = None if runtime is None else runtime.context
    if isinstance(context, Mapping):
        return context.get(SESSION_KEY)
    return getattr(context, SESSION_KEY, None)


class GraphOpenAI(OpenAI):
    def _current_session_id(self) -> str | None:
        return super()._current_session_id() or session_id_of(graph_session())


class GraphAsyncOpenAI(AsyncOpenAI):
    def _current_session_id(self) -> str | None:
        return super()._current_session_id() or session_id_of(graph_session())


def session_to_record(
    own: Session | AsyncSession | str | None, headers: Mapping[str, object]
) -> Session | AsyncSession | None:
    """Return the session object that a call made now should be counted in, if there is one.

    `own` is the model's session, `headers` are its client's default headers, which win over it.
    Where the session is only named, it is the current one if that has this id.
    """
    named = own or current_session() or graph_session()
    if names_session(headers):
        named = session_named_in(headers)
    if not isinstance(named, str):
        return named
    current = current_session()
    return current if current is not None and current.id == named else None
