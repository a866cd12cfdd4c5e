"""What the two session classes have in common: everything but the network."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import openai
from openai.types.chat import ChatCompletion

from ._identity import SESSION_HEADER, check_session_id, names_session, new_session_id
from ._records import CallRecord, SessionUsage
from ._transcript import Message, Transcript, answer_of


class SessionCore:
    """Id, context and call records of a session."""

    def __init__(self, id: str | None, messages: Iterable[Message]) -> None:
        self.id = new_session_id() if id is None else check_session_id(id)
        self._transcript = Transcript()
        self._transcript.append(messages)
        self._lock = threading.Lock()
        self._calls: list[CallRecord] = []
        self._closed = False  # takes no more chats
        self._ended = False  # on the server; a close that failed leaves this to be tried again

    def append(self, *messages: Message) -> None:
        """Add messages to the context; it only ever grows.

        Takes dictionaries of the OpenAI API or message objects of a response. Raises ValueError
        naming the message that cannot stand where it would: an unknown role, a system message at
        the start, a malformed tool call, a tool result without its call. Then none is added.
        """
        self._transcript.append(messages)

    @property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """The context so far. A copy: what has been sent cannot be edited."""
        return tuple(self._transcript.snapshot())

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """The finished calls made by `chat` or by LangGraph nodes, in the order they ended."""
        with self._lock:
            return tuple(self._calls)

    @property
    def usage(self) -> SessionUsage:
        """The sums over `calls`. Calls by other clients are only in the server's `totals()`."""
        return SessionUsage.of(self.calls)

    def record(self, call: CallRecord) -> None:
        """Count a call that was made outside `chat`."""
        with self._lock:
            self._calls.append(call)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id!r}, {len(self.calls)} calls>"

    @property
    def _path(self) -> str:
        return f"/sessions/{quote(self.id, safe='')}"

    def _request(
        self,
        role: str,
        instructions: str | None,
        tools: Iterable[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the arguments of `chat.completions.create` for one call.

        Raises RuntimeError on a closed session, ValueError for what a session cannot do.
        """
        if self._closed:
            raise RuntimeError(f"session {self.id!r} is closed; make a new Session")
        for name in options.keys() & {"model", "messages"}:
            raise ValueError(f"{name}= comes from the session; use the role and append(...)")
        if (options.get("n") or 1) != 1:
            raise ValueError("n= must be 1: the context takes one answer per call")
        if "session_id" in (options.get("extra_body") or {}):
            raise ValueError("extra_body names a session_id; make Session(id) to choose the id")
        context = self._transcript.to_answer()
        # The leading system message is the role's own and no part of the context: the server
        # moves it behind the conversation, so that all roles share the prefix before it.
        head = [] if instructions is None else [{"role": "system", "content": instructions}]
        request = {**options, "model": role, "messages": head + context}
        if tools is not None:
            request["tools"] = list(tools)
        headers = options.get("extra_headers") or {}
        if not names_session(headers):
            request["extra_headers"] = {**headers, SESSION_HEADER: self.id}
        if options.get("stream"):
            request.setdefault("stream_options", {"include_usage": True})
        return request

    def _finish(self, message: Mapping[str, Any], call: CallRecord) -> None:
        """Let an answer join the context and count its call."""
        self._transcript.append([message])
        self.record(call)

    def _finish_completion(self, role: str, completion: ChatCompletion, wall_s: float) -> None:
        choice = completion.choices[0]
        call = CallRecord.of(
            role,
            usage=completion.usage.to_dict() if completion.usage else None,
            extra=(completion.model_extra or {}).get("prefillshare"),
            finish_reason=choice.finish_reason,
            wall_s=wall_s,
        )
        self._finish(answer_of(choice.message.to_dict()), call)


def check_client(client: openai.OpenAI | openai.AsyncOpenAI) -> None:
    """Raise ValueError if the client would send every call under a session of its own."""
    if names_session(client.default_headers):
        raise ValueError(
            "the client names a session in its default headers; give the Session a client without"
        )
