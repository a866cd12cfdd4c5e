"""What the two session classes have in common: everything but the network."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

import openai
from openai.types.chat import ChatCompletion

from . import _prefix_watch
from ._errors import AnswerError
from ._identity import (
    PARENT_HEADER,
    SESSION_HEADER,
    check_session_id,
    names_session,
    new_session_id,
)
from ._limits import Budget, ContextWindow, Hold, Room, answers, most_tokens, wanted
from ._records import CallRecord, SessionUsage
from ._saved import SavedSession
from ._transcript import (
    Checkpoint,
    Message,
    Place,
    Transcript,
    answer_of,
    speakers_shown,
    without_speakers,
)

Client = TypeVar("Client", openai.OpenAI, openai.AsyncOpenAI)
Mode = Literal["share", "isolate"]
Tools = Iterable[Mapping[str, Any]] | openai.NotGiven | openai.Omit

MODE_HEADER = "X-PrefillShare-Mode"

HINT: dict[str, Any] = {"max_retries": 0, "timeout": 10.0}
"""Request options of what only saves time: better not done than waited for."""

logger = logging.getLogger("prefillshare_agents")


class SessionCore:
    """Id, context and call records of a session."""

    def __init__(
        self,
        id: str | None,
        messages: Iterable[Message],
        *,
        mode: Mode = "share",
        speakers: bool = True,
        prefill: bool = False,
        token_budget: int | None = None,
        context_window: ContextWindow = "auto",
    ) -> None:
        if mode not in ("share", "isolate"):
            raise ValueError(f"mode is {mode!r}; give 'share' or 'isolate'")
        self.id = new_session_id() if id is None else check_session_id(id)
        self.mode = mode
        self.parent_id: str | None = None
        """Id of the session that this one is a fork of."""
        self._parent: SessionCore | None = None
        self._options: dict[str, Any] = {
            "mode": mode,
            "speakers": speakers,
            "prefill": prefill,
            "token_budget": token_budget,
            "context_window": context_window,
        }
        self._budget = Budget(token_budget)
        self._room = Room(context_window)
        self._transcript = Transcript()
        self._transcript.append(messages)
        self._lock = threading.Lock()
        self._calls: list[CallRecord] = []
        self._merged: set[str] = set()
        self._owns_client = False
        self._closed = False  # takes no more chats
        self._ended = False  # on the server; a close that failed leaves this to be tried again

    @property
    def headers(self) -> dict[str, str]:
        """What each request of the session carries beside its id: its parent, its mode."""
        parent = {PARENT_HEADER: self.parent_id} if self.parent_id else {}
        return {**parent, **({MODE_HEADER: self.mode} if self.mode != "share" else {})}

    @property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """The context so far. A copy: what has been sent cannot be edited.

        An answer's `name` is the role that gave it.
        """
        return tuple(self._transcript.snapshot())

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """The finished calls of this object, in the order they ended.

        Those of `chat`, and those of this package's clients and of LangGraph nodes that had this
        object as their session. A streamed one counts when its stream has been read.
        """
        with self._lock:
            return tuple(self._calls)

    @property
    def usage(self) -> SessionUsage:
        """The sums over `calls`. Calls by foreign clients are only in the server's `totals()`."""
        return SessionUsage.of(self.calls)

    def record(self, call: CallRecord) -> None:
        """Count a call that no client of this package made, also in the token budget."""
        self._count(call, None)

    def _count(self, call: CallRecord, hold: Hold | None) -> None:
        """Count a call, in place of the tokens set aside for it."""
        with self._lock:
            self._calls.append(call)
        (hold or self._budget).spend(call.prompt_tokens + call.completion_tokens)

    def checkpoint(self) -> Checkpoint:
        """Return the present place in the context, for `restore`."""
        return self._transcript.checkpoint(self.id)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to an earlier place: what was added to the context since is taken back.

        The prefix up to there stays prefilled; calls that were made stay counted, and those that
        run do not join with answers to what is gone. Raises ValueError for a checkpoint of
        another session, or one that was taken back itself.
        """
        if checkpoint.session_id != self.id:
            raise ValueError(
                f"the checkpoint is one of session {checkpoint.session_id!r}, not of {self.id!r}"
            )
        self._transcript.cut(checkpoint)
        _prefix_watch.forget(self.id, but=self.messages)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id!r}, {len(self.calls)} calls>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"session {self.id!r} has a connection and cannot be pickled or copied; "
            "use save(path) and load(path), or fork()"
        )

    @property
    def _path(self) -> str:
        return f"/sessions/{quote(self.id, safe='')}"

    def _client_of(
        self, client: Client | None, base_url: str | None, make: Callable[..., Client]
    ) -> Client | None:
        """Return the client to call through: the one given, one made for `base_url`, or none."""
        self._owns_client = client is None and base_url is not None
        if client is None:
            return None if base_url is None else make(base_url=base_url)
        if base_url is not None:
            raise ValueError("give client= or base_url=, not both")
        if names_session(client.default_headers):
            # It would send every call under a session of its own.
            raise ValueError(
                "the client names a session in its default headers; "
                "give the Session a client without"
            )
        return client

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"session {self.id!r} is closed; make a new Session")

    def _require_client(self, client: object, remedy: str = "ask before close()") -> None:
        """Raise RuntimeError if there is no client, or the one there was is closed."""
        if client is None:
            raise RuntimeError(f"session {self.id!r} has no client; give client= or base_url=")
        owner: SessionCore | None = self
        while owner is not None:
            if owner._ended and owner._owns_client:
                raise RuntimeError(
                    f"session {owner.id!r} is closed, and its client with it; {remedy}"
                )
            owner = owner._parent

    def _request(
        self,
        role: str,
        instructions: str | None,
        tools: Tools | None,
        options: Mapping[str, Any],
    ) -> tuple[dict[str, Any], Place]:
        """Return the arguments of `chat.completions.create` for one call, and its place.

        Raises RuntimeError on a closed session, ValueError or TypeError for what it cannot do.
        """
        self._require_open()
        for name in options.keys() & {"model", "messages"}:
            raise ValueError(f"{name}= comes from the session; use the role and append(...)")
        if (options.get("n") or 1) != 1:
            raise ValueError("n= must be 1: the context takes one answer per call")
        if isinstance(form := options.get("response_format"), type):
            name = form.__name__
            raise TypeError(
                f"response_format is the class {name}; give its schema: {{'type': 'json_schema', "
                f"'json_schema': {{'name': {name!r}, 'schema': {name}.model_json_schema(), "
                "'strict': True}}, or call client.chat.completions.parse inside `with session:`"
            )
        if "session_id" in (options.get("extra_body") or {}):
            raise ValueError("extra_body names a session_id; make Session(id) to choose the id")
        context, place = self._transcript.to_answer()
        if not (self._options["speakers"] and speakers_shown(context, role)):
            context = without_speakers(context)
        # The leading system message is the role's own and no part of the context: the server
        # moves it behind the conversation, so that all roles share the prefix before it.
        head = [] if instructions is None else [{"role": "system", "content": instructions}]
        request = {**options, "model": role, "messages": head + context}
        if not (tools is None or isinstance(tools, openai.NotGiven | openai.Omit)):
            request["tools"] = list(tools)
        headers = options.get("extra_headers") or {}
        if not names_session(headers):
            request["extra_headers"] = {**self.headers, **headers, SESSION_HEADER: self.id}
        if options.get("stream"):
            request.setdefault("stream_options", {"include_usage": True})
        return request, place

    def _prefills_ahead(self, wanted: bool | None) -> bool:
        """Whether what is appended is prefilled at once; isolated roles have no common cache."""
        return self.mode == "share" and (self._options["prefill"] if wanted is None else wanted)

    def _context(self) -> list[dict[str, Any]]:
        """Return the context as a prefill ahead sends it. Raises ValueError if it is empty."""
        self._require_open()
        context = without_speakers(self._transcript.settled())
        if not context:
            raise ValueError("the context is empty; append(...) a message first")
        return context

    def _cannot_prefill(self, error: Exception) -> None:
        logger.warning("session %r: prefill ahead failed: %s", self.id, error)

    def _admit(
        self, role: str, request: Mapping[str, Any], prompt: int | None
    ) -> tuple[dict[str, Any], Hold]:
        """Return the request to send, and what is set aside for it in the budget.

        `prompt`: its tokens as the server counted them; None where that was not needed, or not
        possible. Raises ContextWindowError or TokenBudgetError if there is no room.
        """
        if prompt is not None:
            self._room.require(role, request, prompt)
        if self._budget.limit is None:
            return dict(request), self._budget.reserve(role, 0)
        if prompt is None:
            # What may be too long was to be counted; if that failed, the server has to judge.
            most = most_tokens(request)
            prompt = most if most + wanted(request) <= self._budget.left else 0
        request = self._room.capped(request, self._budget, prompt)
        return request, self._budget.reserve(role, prompt + wanted(request) * answers(request))

    def _needs_count(self, request: Mapping[str, Any]) -> bool:
        return self._room.needs_count(request, self._budget)

    def _has_counted(self, answer: Any) -> int:
        """Take note of what `/tokenize` answered, and return the number of tokens."""
        self._room.counted(answer.get("max_model_len"))
        return int(answer["count"])

    def _cannot_count(self, error: openai.OpenAIError) -> None:
        """Take note that the server counts no tokens, if that is what the error says."""
        if isinstance(error, openai.NotFoundError) and self._room.countable:
            self._room.countable = False
            logger.warning(
                "session %r: the server has no /tokenize, so calls are sent without knowing "
                "whether they fit the context window",
                self.id,
            )

    def _finish(
        self, place: Place, hold: Hold, message: Mapping[str, Any], call: CallRecord
    ) -> None:
        """Count a call and let its answer join the context.

        Raises AnswerError for an answer that cannot stand there; the call is counted then too.
        """
        self._count(call, hold)
        try:
            self._transcript.join({**message, "name": call.role}, place)
        except ValueError as error:
            raise AnswerError(
                f"the answer of role {call.role!r} cannot join the context: {error}", dict(message)
            ) from error

    def _finish_completion(
        self, place: Place, hold: Hold, role: str, completion: ChatCompletion, wall_s: float
    ) -> None:
        call = CallRecord.of_answer(role, completion.to_dict(), wall_s=wall_s)
        self._finish(place, hold, answer_of(completion.choices[0].message.to_dict()), call)

    def _become_fork_of(self, parent: SessionCore) -> None:
        if self.id == parent.id:
            raise ValueError(f"the fork has the id of its parent, {self.id!r}; give another one")
        self.parent_id = parent.id
        self._parent = parent
        self._budget = parent._budget

    def _take(self, branch: SessionCore, summary: str | Message | None) -> None:
        """Add a branch's summary to the context, and its calls to those counted."""
        if branch.parent_id != self.id:
            raise ValueError(f"session {branch.id!r} is not a fork of {self.id!r}")
        if branch.id in self._merged:
            return  # Its end on the server failed, and is tried again.
        if summary is None:
            summary = branch._transcript.last_answer()
            if summary is None:
                raise ValueError(
                    f"session {branch.id!r} has no answer with text to take over; give summary="
                )
        if isinstance(summary, str):
            summary = {"role": "user", "content": summary}
        self._transcript.append([summary])
        self._merged.add(branch.id)
        with self._lock:
            self._calls += branch.calls

    def _saved(self) -> SavedSession:
        return SavedSession(
            id=self.id,
            parent_id=self.parent_id,
            options=self._options,
            messages=self._transcript.snapshot(),
            calls=list(self.calls),
        )

    def _resume(self, saved: SavedSession) -> Self:
        self.parent_id = saved.parent_id
        for call in saved.calls:
            self.record(call)
        return self
