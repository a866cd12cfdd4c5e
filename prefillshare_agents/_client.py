"""OpenAI's clients, tagging every request with the session it belongs to.

Real subclasses with one overridden hook, so that every surface of the parent (streaming, raw
responses, `parse`, retries) keeps working and `isinstance` checks of other libraries hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import openai

from ._context import current_session
from ._identity import SESSION_HEADER, check_session_id, names_session

if TYPE_CHECKING:
    from openai._models import FinalRequestOptions

    from ._session import AsyncSession, Session


class _Keep:
    """Type of `KEEP`: "not given", where None already means "no session"."""


KEEP = _Keep()


def session_id_of(session: Session | AsyncSession | str | None) -> str | None:
    """Return the id behind any accepted form of `session=`. Raises ValueError for a bad id."""
    if session is None:
        return None
    return check_session_id(session if isinstance(session, str) else session.id)


class OpenAI(openai.OpenAI):
    """`openai.OpenAI` whose requests carry a session.

    >>> client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="local", session="order-4711")

    The session of a request is the first that exists of: a session header among the request's or
    the client's own headers (`openai.Omit()` counts: no session), `session=` of the client, the
    `with session:` block around the call. Otherwise none is sent; one is never made up.
    """

    def __init__(
        self, *, session: Session | AsyncSession | str | None = None, **openai_options: Any
    ) -> None:
        super().__init__(**openai_options)
        self._session_id = session_id_of(session)

    def _current_session_id(self) -> str | None:
        return self._session_id or session_id_of(current_session())

    def _prepare_options(self, options: FinalRequestOptions) -> FinalRequestOptions:
        # Runs once per attempt, so it has to leave an already tagged request as it is.
        options = super()._prepare_options(options)
        return _tag(options, self.default_headers, self._current_session_id())

    def copy(
        self,
        *,
        session: Session | AsyncSession | str | _Keep | None = KEEP,
        _extra_kwargs: Mapping[str, Any] = {},
        **openai_options: Any,
    ) -> Self:
        """Return a client with some options replaced; keeps the session unless one is given."""
        kept = self._session_id if isinstance(session, _Keep) else session
        return super().copy(_extra_kwargs={**_extra_kwargs, "session": kept}, **openai_options)

    # The parent's alias is bound to the parent's `copy`, which would drop the session.
    with_options = copy


class AsyncOpenAI(openai.AsyncOpenAI):
    """`openai.AsyncOpenAI` whose requests carry a session: the async twin of `OpenAI`."""

    def __init__(
        self, *, session: Session | AsyncSession | str | None = None, **openai_options: Any
    ) -> None:
        super().__init__(**openai_options)
        self._session_id = session_id_of(session)

    def _current_session_id(self) -> str | None:
        return self._session_id or session_id_of(current_session())

    async def _prepare_options(self, options: FinalRequestOptions) -> FinalRequestOptions:
        options = await super()._prepare_options(options)
        return _tag(options, self.default_headers, self._current_session_id())

    def copy(
        self,
        *,
        session: Session | AsyncSession | str | _Keep | None = KEEP,
        _extra_kwargs: Mapping[str, Any] = {},
        **openai_options: Any,
    ) -> Self:
        """Return a client with some options replaced; keeps the session unless one is given."""
        kept = self._session_id if isinstance(session, _Keep) else session
        return super().copy(_extra_kwargs={**_extra_kwargs, "session": kept}, **openai_options)

    with_options = copy


def _tag(
    options: FinalRequestOptions, default_headers: Mapping[str, object], session_id: str | None
) -> FinalRequestOptions:
    """Return `options` with the session header added, unless the request settles it itself."""
    own = {} if isinstance(options.headers, openai.NotGiven) else options.headers
    bodies = (options.json_data, options.extra_json)
    in_body = any(isinstance(body, Mapping) and "session_id" in body for body in bodies)
    if session_id is None or in_body or names_session(own) or names_session(default_headers):
        return options
    # A new mapping: the old one belongs to the caller.
    options.headers = {**own, SESSION_HEADER: session_id}
    return options
