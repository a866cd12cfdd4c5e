"""One chat request of a client: its session, its room there, its prefix, what it cost."""

from __future__ import annotations

import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import openai
from openai import BaseModel
from openai._legacy_response import LegacyAPIResponse
from openai.types.chat import ChatCompletionChunk

from . import _prefix_watch
from ._context import current_role, current_session
from ._core import SessionCore
from ._errors import PrefixBreakError
from ._identity import (
    SESSION_HEADER,
    check_session_id,
    names_session,
    parent_named_in,
    session_named_in,
)
from ._limits import Hold
from ._prefix_watch import STRICT_HEADER
from ._records import CallRecord
from ._retries import in_node, settle
from ._stream import StreamedAnswer

if TYPE_CHECKING:
    from openai._models import FinalRequestOptions

    from ._async_session import AsyncSession
    from ._client import AsyncOpenAI, OpenAI
    from ._session import Session

CHAT_PATH = "/chat/completions"
_RAW_HEADER = "x-stainless-raw-response"
"""By which openai's `with_raw_response` asks its own client for the response as it is."""


def session_id_of(session: Session | AsyncSession | str | None) -> str | None:
    """Return the id behind any accepted form of `session=`. Raises ValueError for a bad id."""
    if session is None:
        return None
    value = session if isinstance(session, str) else getattr(session, "id", None)
    if not isinstance(value, str):
        raise TypeError(f"session is {session!r}; give a Session, its id, or None")
    return check_session_id(value)


class Call:
    """What a client does for a request beside sending it."""

    def __init__(self, client: OpenAI | AsyncOpenAI, options: FinalRequestOptions) -> None:
        self._server = str(client.base_url)
        self._policy = client._on_prefix_break
        self._max_retries = client.max_retries
        own = {} if isinstance(options.headers, openai.NotGiven) else options.headers
        self.is_chat = options.method.lower() == "post" and options.url == CHAT_PATH
        self.body = _body(options)
        self.options = options
        named: Any
        if names_session(own) or names_session(client.default_headers):
            # The request's own headers come before the client's.
            named = session_named_in(own if names_session(own) else client.default_headers)
            self.session_id = named
        elif "session_id" in self.body:
            named = self.body["session_id"]
            self.session_id = named if isinstance(named, str) else None
        else:
            named = client._named_session()
            self.session_id = session_id_of(named)
            own = {**_tags(named), **own}
        self.parent_id = parent_named_in(own)
        # Where openai's types were not kept to, the server says what is wrong.
        is_plain = self.is_chat and isinstance(self.body.get("messages"), list)
        self.session = _object(named) if is_plain else None
        """The session, if it is there as an object: only one of those has limits and counts."""
        if self.is_chat and self.session_id and self._policy == "raise":
            own = {STRICT_HEADER: "true", **own}
        if own:
            # A new mapping: the old one belongs to the caller.
            options.headers = own
        self._role = current_role() or str(self.body.get("model"))
        self._hold: Hold | None = None
        self._answer: StreamedAnswer | None = None

    def check(self) -> None:
        """Look for a prefix break. Raises PrefixBreakError if the client's policy is "raise"."""
        if self.is_chat and self.session_id:
            _prefix_watch.before_sending(self._server, self.session_id, self.body, self._policy)

    @property
    def counting(self) -> dict[str, Any]:
        """Options of the request that counts this one's tokens."""
        headers: Any = self.options.headers
        if not isinstance(headers, openai.NotGiven):
            headers = {name: headers[name] for name in headers if name.lower() != _RAW_HEADER}
        return {"headers": headers, "timeout": self.options.timeout}

    def admit(self, prompt: int | None) -> None:
        """Set aside in the session's budget what the call can take.

        `prompt`: its tokens, where they were counted. Raises ContextWindowError or
        TokenBudgetError if there is no room.
        """
        assert self.session is not None
        admitted, self._hold = self.session._admit(self._role, self.body, prompt)
        most = "max_completion_tokens"
        if most in admitted and most not in self.body and isinstance(self.options.json_data, dict):
            self.options.json_data = {**self.options.json_data, most: admitted[most]}

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Around the sending: nothing stays set aside if it fails.

        Raises PrefixBreakError for a refusal of a break, for it was asked for.
        """
        self._started = time.perf_counter()
        try:
            yield
        except BaseException as error:
            if self._hold is not None:
                self._hold.release()
            if isinstance(error, openai.APIError):
                if _is_refusal(error):
                    raise PrefixBreakError(error.message) from error
                if in_node() and self.options.get_max_retries(self._max_retries) > 0:
                    settle(error)  # For the node's retry policy: the client has retried it.
            raise

    def saw(self, result: Any, *, stream: bool) -> None:
        """Remember what was sent, tell of the break that the server found, count what it cost."""
        if self.is_chat and self.session_id:
            _prefix_watch.was_sent(self._server, self.session_id, self.body)
            verdict = _verdict(result)
            _prefix_watch.server_said(self._server, self.session_id, verdict, self._policy)
        if self._hold is None:
            return
        if stream and isinstance(result, LegacyAPIResponse):
            result = result.parse()  # It keeps this object, and gives it to the caller.
        if isinstance(result, openai.Stream | openai.AsyncStream):
            self._watch(result)
            self._until_closed(result.response)
        elif (answer := _whole(result)) is not None:
            wall_s = time.perf_counter() - self._started
            self._count(CallRecord.of_answer(self._role, answer, wall_s=wall_s))
        elif (response := getattr(result, "http_response", None)) is not None:
            self._until_closed(response)
        else:
            self._hold.release()

    def _watch(self, stream: openai.Stream[Any] | openai.AsyncStream[Any]) -> None:
        """Let the answer of `stream` be seen as it is read."""
        self._answer = StreamedAnswer(self._role, self._started)
        if isinstance(stream, openai.Stream):
            stream._iterator = _seen(stream._iterator, self._see)
        else:
            stream._iterator = _aseen(stream._iterator, self._see)

    def _see(self, chunk: Any) -> None:
        # A caller can have streams read as something else.
        if self._answer is None or not isinstance(chunk, ChatCompletionChunk):
            return
        try:
            self._answer.add(chunk)
        except (AttributeError, KeyError, TypeError, ValueError):
            self._answer = None  # Another server's chunk: it is the caller's, and is not counted.

    def _until_closed(self, response: Any) -> None:
        """Keep the tokens set aside until the HTTP response is closed, however that comes about.

        All that openai makes of a stream closes its response: at the end, on an error, by hand.
        """
        assert self._hold is not None
        for name, wrap in (("close", _then), ("aclose", _athen)):
            setattr(response, name, wrap(getattr(response, name), self._over))
        # One that is dropped unread is closed by nobody.
        weakref.finalize(response, self._hold.release).atexit = False

    def _over(self) -> None:
        assert self._hold is not None
        if (answer := self._answer) is not None and answer.is_whole:
            self._answer = None
            self._count(answer.record())
        self._hold.release()

    def _count(self, record: CallRecord) -> None:
        assert self.session is not None
        self.session._count(record, self._hold)


def _object(named: Any) -> SessionCore | None:
    """Return the session object behind `named`; of an id, the current one if it has that id."""
    if isinstance(named, SessionCore):
        return named
    current = current_session()
    return current if current is not None and current.id == named else None


def _is_refusal(error: openai.APIError) -> bool:
    """Whether the server refused a request because it breaks the prefix."""
    return isinstance(error, openai.UnprocessableEntityError) and error.code == "prefix_break"


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


def _whole(result: Any) -> Mapping[str, Any] | None:
    """Return an answer that is there already as the server's JSON object, or None."""
    if isinstance(result, BaseModel):
        # Without warnings: pydantic does not expect the parsed object of a `.parse()` result.
        return result.to_dict(warnings=False)
    if isinstance(result, LegacyAPIResponse):
        try:
            result = result.http_response.json()
        except ValueError:
            return None
    return result if isinstance(result, Mapping) else None


def _seen(items: Iterator[Any], see: Callable[[Any], None]) -> Iterator[Any]:
    for item in items:
        see(item)
        yield item


async def _aseen(items: AsyncIterator[Any], see: Callable[[Any], None]) -> AsyncIterator[Any]:
    async for item in items:
        see(item)
        yield item


def _then(close: Callable[[], None], over: Callable[[], None]) -> Callable[[], None]:
    def closed() -> None:
        try:
            close()
        finally:
            over()

    return closed


def _athen(close: Callable[[], Any], over: Callable[[], None]) -> Callable[[], Any]:
    async def closed() -> None:
        try:
            await close()
        finally:
            over()

    return closed
