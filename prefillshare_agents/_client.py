"""OpenAI's clients, tagging every request with the session it belongs to.

Real subclasses with one overridden method, `request`, through which every surface of the parent
goes (streaming, raw responses, `parse`, `.stream()`), once per call and not once per retry.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, Unpack

import openai

from ._call import CHAT_PATH, Call, session_id_of
from ._context import current_session
from ._counting import acount_if_needed, count_if_needed
from ._options import ClientOptions, SessionOptions
from ._prefix_watch import OnPrefixBreak, check_policy
from ._trace import TRACE, trace

if TYPE_CHECKING:
    from openai._models import FinalRequestOptions

    from ._async_session import AsyncSession
    from ._session import Session

SESSION_VARIABLE = "PREFILLSHARE_SESSION"
"""Environment variable with the session of calls that have no other."""


class _Keep:
    """Type of `KEEP`: "not given", where None already means "no session"."""


KEEP = _Keep()


class _WithSession:
    """What both clients have beside openai's."""

    _session: Session | AsyncSession | str | None
    _on_prefix_break: OnPrefixBreak

    def _named_session(self) -> Session | AsyncSession | str | None:
        """The session of calls that do not name one themselves."""
        return self._session or current_session() or _of_environment()

    def _kept(
        self,
        session: Session | AsyncSession | str | _Keep | None,
        on_prefix_break: OnPrefixBreak | None,
    ) -> dict[str, Any]:
        """Return the constructor's options of a copy."""
        return {
            "session": self._session if isinstance(session, _Keep) else session,
            "on_prefix_break": on_prefix_break or self._on_prefix_break,
        }


def _of_environment() -> str | None:
    value = os.environ.get(SESSION_VARIABLE) or None
    try:
        return session_id_of(value)
    except ValueError as error:
        raise ValueError(f"{SESSION_VARIABLE} in the environment: {error}") from None


class OpenAI(_WithSession, openai.OpenAI):
    """`openai.OpenAI` whose requests carry a session.

    >>> client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="local", session="order-4711")

    The session of a request is the first that exists of: a session header among the request's or
    the client's own headers (`openai.Omit()` counts: no session), `session=` of the client, the
    `with session:` block around the call, `PREFILLSHARE_SESSION` in the environment. Otherwise
    none is sent; one is never made up.

    A chat call whose session is a `Session` object counts in it, and raises ContextWindowError or
    TokenBudgetError, before it is sent, where that has no room for it. A session that is only
    named has no limits.

    `on_prefix_break` says what happens when a chat request does not extend what its session sent
    before: "warn" (PrefixBreakWarning, once per session and cause), "raise" (PrefixBreakError
    before anything is computed) or "ignore".
    """

    def __init__(
        self,
        *,
        session: Session | AsyncSession | str | None = None,
        on_prefix_break: OnPrefixBreak = "warn",
        **openai_options: Unpack[ClientOptions],
    ) -> None:
        # First, because openai's finalizer reports an error if its constructor was not reached.
        super().__init__(**openai_options)
        session_id_of(session)
        self._session = session
        self._on_prefix_break = check_policy(on_prefix_break)

    def session(self, id: str | None = None, **options: Unpack[SessionOptions]) -> Session:
        """Return a `Session` whose calls go through this client.

        >>> with client.session("order-4711"):
        ...     client.chat.completions.create(model="critic", messages=messages)

        Inside the block the calls of this package's clients belong to the session, in threads
        and asyncio tasks that inherit the context too; but not those of a client with a `session=`
        of its own, and none with a session header. `options` are those of `Session`.
        """
        from ._session import Session

        return Session(id, client=self, **options)

    def request(
        self,
        cast_to: Any,
        options: FinalRequestOptions,
        *,
        stream: bool = False,
        stream_cls: Any = None,
    ) -> Any:
        call = Call(self, options)
        if call.is_chat and os.environ.get(TRACE):
            trace(call.session_id, call.parent_id, CHAT_PATH, call.body)
        call.check()
        if call.session is not None:
            call.admit(count_if_needed(call.session, self, call.body, **call.counting))
        with call.sending():
            result = super().request(cast_to, call.options, stream=stream, stream_cls=stream_cls)
        call.saw(result, stream=stream)
        return result

    def copy(
        self,
        *,
        session: Session | AsyncSession | str | _Keep | None = KEEP,
        on_prefix_break: OnPrefixBreak | None = None,
        _extra_kwargs: Mapping[str, Any] = {},
        **openai_options: Any,
    ) -> Self:
        """Return a client with some options replaced; keeps the session unless one is given."""
        extra = {**_extra_kwargs, **self._kept(session, on_prefix_break)}
        return super().copy(_extra_kwargs=extra, **openai_options)

    # The parent's alias is bound to the parent's `copy`, which would drop the session.
    with_options = copy


class AsyncOpenAI(_WithSession, openai.AsyncOpenAI):
    """`openai.AsyncOpenAI` whose requests carry a session: the async twin of `OpenAI`."""

    def __init__(
        self,
        *,
        session: Session | AsyncSession | str | None = None,
        on_prefix_break: OnPrefixBreak = "warn",
        **openai_options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(**openai_options)
        session_id_of(session)
        self._session = session
        self._on_prefix_break = check_policy(on_prefix_break)

    def session(self, id: str | None = None, **options: Unpack[SessionOptions]) -> AsyncSession:
        """Return an `AsyncSession` whose calls go through this client; see `OpenAI.session`."""
        from ._async_session import AsyncSession

        return AsyncSession(id, client=self, **options)

    async def request(
        self,
        cast_to: Any,
        options: FinalRequestOptions,
        *,
        stream: bool = False,
        stream_cls: Any = None,
    ) -> Any:
        call = Call(self, options)
        if call.is_chat and os.environ.get(TRACE):
            await asyncio.to_thread(trace, call.session_id, call.parent_id, CHAT_PATH, call.body)
        call.check()
        if call.session is not None:
            call.admit(await acount_if_needed(call.session, self, call.body, **call.counting))
        with call.sending():
            result = await super().request(
                cast_to, call.options, stream=stream, stream_cls=stream_cls
            )
        call.saw(result, stream=stream)
        return result

    def copy(
        self,
        *,
        session: Session | AsyncSession | str | _Keep | None = KEEP,
        on_prefix_break: OnPrefixBreak | None = None,
        _extra_kwargs: Mapping[str, Any] = {},
        **openai_options: Any,
    ) -> Self:
        """Return a client with some options replaced; keeps the session unless one is given."""
        extra = {**_extra_kwargs, **self._kept(session, on_prefix_break)}
        return super().copy(_extra_kwargs=extra, **openai_options)

    with_options = copy
