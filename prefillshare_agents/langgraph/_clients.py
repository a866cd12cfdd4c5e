"""The clients behind `ChatPrefillShare`: they also find the session in a running graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import RunnableConfig
from langgraph.config import get_config

from .. import AsyncOpenAI, AsyncSession, CallRecord, OpenAI, Session, current_session
from .._context import warn_if_left
from .._identity import session_id_of_thread
from .._limits import Hold
from ._retry import retried_outside
from ._runs import may_have_left

if TYPE_CHECKING:
    from openai._models import FinalRequestOptions

SESSION_KEY = "prefillshare_session"
"""Field of a graph's `context=`, or key of `config["configurable"]`, that names the session."""


_RUNTIME = "__pregel_runtime"
"""Where LangGraph keeps a run's `context` in the config that it hands to nodes."""


def session_of_call(config: RunnableConfig | None) -> Session | AsyncSession | None:
    """Return the session of a call that is given `config`; None if nothing names one.

    The `with session:` block around it, or what `graph_session` finds.
    """
    return current_session() or as_session(graph_session(config))


def as_session(named: Session | AsyncSession | str | None) -> Session | AsyncSession | None:
    """Return the session itself; by an id, the current one if it has that id. Raises TypeError.

    Another session that is known by its id only has no limits, and no records of its calls.
    """
    if named is None or (
        isinstance(named, Session | AsyncSession) and not isinstance(named, _NamedOnly)
    ):
        return named
    if not isinstance(named, str | _NamedOnly):
        raise TypeError(f"session is {named!r}; give a Session or its id")
    made = _NamedOnly(named) if isinstance(named, str) else named
    current = current_session()
    return current if current is not None and current.id == made.id else made


class _NamedOnly(Session):
    """A session of which the id is known, and no more: it has no limits and counts nothing.

    Nobody could ask it, and the graph or agent that has it may make calls for ever.
    """

    def __init__(self, id: str) -> None:
        super().__init__(id, context_window=None)

    def _count(self, call: CallRecord, hold: Hold | None) -> None:
        if hold is not None:
            hold.release()


def graph_session(config: RunnableConfig | None = None) -> Session | AsyncSession | str | None:
    """Return the session that a call's `config` or the running graph names, or None.

    The first that exists of: the run's `context`, `configurable["prefillshare_session"]`, a hash
    of `configurable["thread_id"]`, each in the call's own config before that of the graph around
    it. Never a made-up one, and a thread's is thus the same after a restart.
    """
    places: list[Mapping[str, Any]] = [(config or {}).get("configurable") or {}]
    with suppress(RuntimeError):  # not inside a graph
        places.append(get_config().get("configurable") or {})
    named = _first(map(_in_context, places)) or _first(place.get(SESSION_KEY) for place in places)
    if named is not None and not isinstance(named, Session | AsyncSession | str):
        raise TypeError(f"{SESSION_KEY} is {named!r}; give a Session or its id")
    thread = _first(place.get("thread_id") for place in places)
    if named is None and thread is not None:
        return session_id_of_thread(thread)
    return named


def agent_name() -> str | None:
    """Return the name of the `create_agent` agent or node that calls; None outside a graph."""
    try:
        metadata = get_config().get("metadata") or {}
    except RuntimeError:
        return None
    return metadata.get("lc_agent_name")


def groups_runs() -> bool:
    """Return whether the runs of the graph around the caller have a `session_id` already."""
    try:
        return "session_id" in (get_config().get("metadata") or {})
    except RuntimeError:
        return False


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _in_context(configurable: Mapping[str, Any]) -> Any:
    context = getattr(configurable.get(_RUNTIME), "context", None)
    if isinstance(context, Mapping):
        return context.get(SESSION_KEY)
    return getattr(context, SESSION_KEY, None)


def _named(session: Session | AsyncSession | str | None) -> Session | AsyncSession | str | None:
    found = session or current_session() or graph_session()
    if found is None and may_have_left():
        warn_if_left()
    return found


class GraphOpenAI(OpenAI):
    def _named_session(self) -> Session | AsyncSession | str | None:
        # The environment's session, which the parent knows too, is that of last resort.
        return _named(self._session) or super()._named_session()

    def request(self, cast_to: Any, options: FinalRequestOptions, **kwargs: Any) -> Any:
        if retried_outside():
            options.max_retries = 0
        return super().request(cast_to, options, **kwargs)


class GraphAsyncOpenAI(AsyncOpenAI):
    def _named_session(self) -> Session | AsyncSession | str | None:
        # The environment's session, which the parent knows too, is that of last resort.
        return _named(self._session) or super()._named_session()

    async def request(self, cast_to: Any, options: FinalRequestOptions, **kwargs: Any) -> Any:
        if retried_outside():
            options.max_retries = 0
        return await super().request(cast_to, options, **kwargs)
