"""A graph and the session of its runs, tied together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBinding
from langchain_core.runnables.config import merge_configs

from ._bindings import KeepsSession
from ._clients import SESSION_KEY, as_session
from ._within import AnySession, awithin, within


def session_config(session: AnySession | str, **config: Any) -> RunnableConfig:
    """Return the `config` of a run that belongs to `session`; `config` is what else it holds.

    >>> graph.stream(task, session_config(session))

    The calls of all its nodes carry the session, wherever the run is consumed, and every run of a
    trace its id as the metadata `session_id`, by which LangSmith groups them.
    """
    configurable = {**(config.pop("configurable", None) or {}), SESSION_KEY: session}
    session_id = session if isinstance(session, str) else session.id
    metadata = {"session_id": session_id, **(config.pop("metadata", None) or {})}
    made: RunnableConfig = {**config, "configurable": configurable, "metadata": metadata}  # type: ignore[typeddict-item]
    return made


def bind(graph: Runnable[Any, Any], session: AnySession | str) -> BoundGraph:
    """Return `graph` with all its runs in `session`, whatever block they are started or read in.

    >>> chunks = bind(graph, session).stream(task, stream_mode="messages")

    A stream of a plain graph begins to run when it is first read; if it was made inside
    `with session:` and is read after the block, its calls have lost the session. This one keeps
    it. Everything else about the graph (`get_state`, `update_state`) is there as before.
    """
    kept = as_session(session)
    assert kept is not None
    return BoundGraph(bound=graph, config=session_config(kept))


class BoundGraph(KeepsSession[Any, Any], RunnableBinding[Any, Any]):
    """What `bind` returns: a graph whose runs belong to one session."""

    @property
    def session(self) -> AnySession:
        """The session of all runs."""
        # In the config, for LangChain makes bindings anew from their own fields.
        session = as_session(self.config["configurable"][SESSION_KEY])
        assert session is not None  # `bind` put it there
        return session

    def _session_for(self, config: RunnableConfig | None) -> AnySession:
        return self.session

    def with_config(self, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """As the parent's; `configurable` and `metadata` are added to, for the session is there."""
        more: Any = kwargs
        return super().with_config(merge_configs(self.config, config, more))

    def stream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        made: Any = super().stream_events(input, config, **kwargs)
        if (steps := getattr(made, "_graph_iter", None)) is not None:
            # LangGraph's experimental run object pulls the graph's stream by itself.
            made._graph_iter = within(self.session, steps)
        return made

    def astream_events(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Any:
        made: Any = super().astream_events(input, config, **kwargs)
        return made if isinstance(made, AsyncIterator) else self._events_object(made)

    async def _events_object(self, made: Awaitable[Any]) -> Any:
        run = await made
        if (steps := getattr(run, "_graph_aiter", None)) is not None:
            run._graph_aiter = awithin(self.session, steps)
        return run
