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

from . import _prefix_watch
from ._context import current_session
from ._errors import PrefixBreakError
from ._identity import (
    SESSION_HEADER,
    check_session_id,
    names_session,
    parent_named_in,
    session_named_in,
)
from ._options import ClientOptions, SessionOptions
from ._prefix_watch import STRICT_HEADER, OnPrefixBreak, check_policy
from ._trace import TRACE, trace

if TYPE_CHECKING:
    from openai._models import FinalRequestOptions

    from ._async_session import AsyncSession
    from ._session import Session

SESSION_VARIABLE = "PREFILLSHARE_SESSION"
"""Environment variable with the session of calls that have no other."""

CHAT_PATH = "/chat/completions"


class _Keep:
    """Type of `KEEP`: "not given", where None already means "no session"."""


KEEP = _Keep()


def session_id_of(session: Session | AsyncSession | str | None) -> str | None:
    """Return the id behind any accepted form of `session=`. Raises ValueError for a bad id."""
    if session is None:
        return None
    value = session if isinstance(session, str) else getattr(session, "id", None)
    if not isinstance(value, str):
        raise TypeError(f"session is {session!r}; give a Session, its id, or None")
    return check_session_id(value)


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

        Inside the block every call of this package's clients belongs to the session, in threads
        and asyncio tasks that inherit the context too. `options` are those of `Session`.
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
        call = _Call(self, options)
        if call.is_chat and os.environ.get(TRACE):
            trace(call.session_id, call.parent_id, CHAT_PATH, call.body)
        call.check()
        try:
            result = super().request(cast_to, call.options, stream=stream, stream_cls=stream_cls)
        except openai.UnprocessableEntityError as error:
            if refusal := call.refusal(error):
                raise refusal from error
            raise
        call.saw(result)
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
        call = _Call(self, options)
        if call.is_chat and os.environ.get(TRACE):
            await asyncio.to_thread(trace, call.session_id, call.parent_id, CHAT_PATH, call.body)
        call.check()
        try:
            result = await super().request(
                cast_to, call.options, stream=stream, stream_cls=stream_cls
            )
        except openai.UnprocessableEntityError as error:
            if refusal := call.refusal(error):
                raise refusal from error
            raise
        call.saw(result)
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


class _Call:
    """One request of a client: its session, and what is told about its prefix."""

    def __init__(self, client: OpenAI | AsyncOpenAI, options: FinalRequestOptions) -> None:
        self._server = str(client.base_url)
        self._policy = client._on_prefix_break
        own = {} if isinstance(options.headers, openai.NotGiven) else options.headers
        self.is_chat = options.method.lower() == "post" and options.url == CHAT_PATH
        self.body = _body(options)
        self.options = options
        if names_session(own) or names_session(client.default_headers):
            # The request's own headers come before the client's.
            named = own if names_session(own) else client.default_headers
            self.session_id = session_named_in(named)
        elif "session_id" in self.body:
            named_in_body = self.body["session_id"]
            self.session_id = named_in_body if isinstance(named_in_body, str) else None
        else:
            session = client._named_session()
            self.session_id = session_id_of(session)
            own = {**_tags(session), **own}
        self.parent_id = parent_named_in(own)
        if self.is_chat and self.session_id and self._policy == "raise":
            own = {STRICT_HEADER: "true", **own}
        if own:
            # A new mapping: the old one belongs to the caller.
            options.headers = own

    def check(self) -> None:
        """Look for a prefix break. Raises PrefixBreakError if the client's policy is "raise"."""
        if self.is_chat and self.session_id:
            _prefix_watch.before_sending(self._server, self.session_id, self.body, self._policy)

    def saw(self, result: Any) -> None:
        """Remember what was sent, and tell of the break that the server found, if it did."""
        if self.is_chat and self.session_id:
            _prefix_watch.was_sent(self._server, self.session_id, self.body)
            verdict = _verdict(result)
            _prefix_watch.server_said(self._server, self.session_id, verdict, self._policy)

    def refusal(self, error: openai.UnprocessableEntityError) -> PrefixBreakError | None:
        """Return what to raise for a 422, if it is the refusal of a break: it was asked for."""
        return PrefixBreakError(error.message) if error.code == "prefix_break" else None


def _body(options: FinalRequestOptions) -> dict[str, Any]:
    parts = (options.json_data, options.extra_json)
    return {
        name: value for part in parts if isinstance(part, Mapping) for name, value in part.items()
    }


def _tags(session: Session | AsyncSession | str | None) -> dict[str, str]:
    """Return the headers by which a request belongs to `session`."""
    session_id = session_id_of(session)
    if session_id is None:
        return {}
    return {SESSION_HEADER: session_id, **getattr(session, "headers", {})}


def _verdict(result: Any) -> Any:
    """Return the server's verdict on the prefix in any form of response."""
    response = getattr(result, "response", None)  # of a stream
    headers = getattr(result, "headers", None) or getattr(response, "headers", None)
    if headers is not None:
        return _prefix_watch.verdict_in(headers)
    extra = getattr(result, "model_extra", None) or {}
    account = extra.get("prefillshare")
    return account.get("break") if isinstance(account, Mapping) else None
