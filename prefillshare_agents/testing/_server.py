"""`FakeServer`: the server's contract on 127.0.0.1, for tests of programs that speak to it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Literal, Self, overload

from prefillshare_prefix import Layout

from ._asking import check_messages
from ._endpoints import Endpoints
from ._errors import ApiError
from ._http import Ending, HttpServer
from ._ledger import Ledger
from ._rendering import render
from ._request import Request
from ._script import Answer, Failure
from ._sharing import Sharing
from ._state import Cut, Gate, State


class FakeServer:
    """An in-process server that speaks the real one's HTTP contract and computes nothing.

    Answers come from a script; prompts are really rendered, counted and compared, so a test can
    ask how much of them a program's calls shared. Use it as a context manager.
    """

    def __init__(
        self,
        roles: Iterable[str] | None = None,
        *,
        layout: Layout = "context_first",
        block_size: int = 1,
        max_model_len: int = 32_768,
        strict_script: bool = False,
    ) -> None:
        """`roles`: those there are; by default every name is one. `layout`: "model" puts the
        system message and the tools first, as an ordinary server does: the control.
        `block_size`: tokens in a KV block; only whole blocks are found cached.
        `strict_script`: a call without a scripted answer is an error.
        """
        if isinstance(roles, str):
            raise TypeError(f"roles is {roles!r}; give a list: [{roles!r}]")
        if layout not in ("context_first", "model"):
            raise ValueError(f"layout is {layout!r}; give 'context_first' or 'model'")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; give at least 1")
        self._state = State(
            roles=None if roles is None else frozenset(roles),
            layout=layout,
            max_model_len=max_model_len,
            strict_script=strict_script,
            ledger=Ledger(block_size, layout),
        )
        self._http = HttpServer(Endpoints(self._state))
        self.url = f"http://127.0.0.1:{self._http.port}/v1"
        """What clients take as `base_url`."""
        self.port = self._http.port

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Serve until `stop`, for those who cannot use `with`."""
        self._http.start()

    def stop(self) -> None:
        """End open answers and stop serving. Does nothing when it has stopped already."""
        self._state.stopping.set()
        self._http.stop()

    # What it answers

    @overload
    def script(self, answers: Answer | Iterable[Answer], /) -> None: ...
    @overload
    def script(self, role: str, answers: Answer | Iterable[Answer], /) -> None: ...
    def script(self, *given: Any) -> None:
        """Plan the next answers, of one role or of whichever role is called.

        An answer is a text, an assistant message (its `finish_reason` may be given; tool calls
        may be `{"name", "arguments"}`), an HTTP status or `Failure`, or a function from the
        `Request` to one of these. A function in place of the list gives all later answers. An
        answer comes as it stands here, whatever `max_tokens`, `stop` or `response_format` say.
        """
        role, answers = given if len(given) == 2 else (None, *given)
        with self._state.changed:
            self._state.script.add(role, answers)

    def fail(self, *statuses: int | Failure) -> None:
        """Answer the next requests, of any kind but GET, with these HTTP statuses."""
        failures = [Failure(item) if isinstance(item, int) else item for item in statuses]
        with self._state.changed:
            self._state.failures.extend(failures)

    def cut_stream(
        self,
        after: int | None = None,
        *,
        how: Literal["end", "reset", "error"] = "end",
        times: int = 1,
    ) -> None:
        """Break off the next `times` streams after so many events, or before their last one.

        `how`: "end" closes it cleanly without a finish_reason, "reset" closes the connection
        under it, "error" sends an error event last, as the router does when nothing helps.
        """
        failure = Failure(503, "decode_aborted") if how == "error" else None
        ending: Ending = "reset" if how == "reset" else "end"
        with self._state.changed:
            self._state.cuts.extend([Cut(after, ending, failure)] * times)

    def delay(
        self, until: threading.Event, *, role: str | None = None, after: int | None = None
    ) -> None:
        """Hold answers until `until` is set: whole ones, or streams after so many events."""
        self._state.gates.append(Gate(until, after, role))

    def wait_for_chats(self, count: int, timeout: float = 10.0) -> None:
        """Wait until `count` chats have arrived since the start, answered or not.

        Raises TimeoutError after `timeout` seconds. Blocks: in a coroutine, call it through
        `asyncio.to_thread`.
        """
        if not self._state.wait_for(lambda: len(self.chats) >= count, timeout):
            raise TimeoutError(f"{len(self.chats)} chats arrived within {timeout:g} s, not {count}")

    # What it was sent

    @property
    def requests(self) -> list[Request]:
        """Everything that arrived, in order of arrival."""
        return list(self._state.requests)

    @property
    def chats(self) -> list[Request]:
        """The chat calls among them, also those that were answered with an error."""
        return list(self._state.chats)

    @property
    def sessions(self) -> dict[str, dict[str, Any]]:
        """Totals of the live sessions, as `GET /v1/sessions/{id}` gives them."""
        with self._state.changed:
            live = self._state.ledger.sessions.values()
            return {session.id: session.report() for session in live}

    def calls(self, session: str) -> list[dict[str, Any]]:
        """What each call of a live session cost, as `GET /v1/sessions/{id}/calls` lists it.

        Raises KeyError if there is no such session.
        """
        with self._state.changed:
            return list(self._state.ledger.sessions[session].calls)

    def rendered(self, index: int) -> str:
        """The prompt of a chat call, as the model would read it. `index` is that in `chats`.

        Raises ValueError for a call whose messages cannot be rendered: it was refused.
        """
        body = self._state.chats[index].body
        try:
            check_messages(body)
        except ApiError as error:
            why = f"chat {index} was refused and has no prompt: {error.message}"
            raise ValueError(why) from None
        return render(body["messages"], body.get("tools"), self._state.layout).text

    # What it asserts

    def shared(self, index: int) -> int:
        """Leading prompt tokens that chat `index` has in common with an earlier prompt of its
        session, the one that it shares most with; 0 for a call that failed."""
        account = self._state.chats[index].account
        return account.shared if account is not None else 0

    @property
    def could_share(self) -> bool:
        """Whether some chat had context tokens that an earlier call had read."""
        return self._sharing().possible

    def shared_ratio(self, of: Literal["shareable", "prompt"] = "shareable") -> float:
        """How much of what could be shared was shared, from 0 to 1.

        Counted over the chats that follow another one of their session (of its parent, or a
        prefill). `of="shareable"`: their context tokens that an earlier call of the session had
        read, at the same place or, after a break, at any; what is new in a call, the leading
        system message and the tools do not count, so 1.0 means that nothing was read twice. A
        call without a session shares nothing, and what it repeats of earlier calls counts.
        `of="prompt"`: all their prompt tokens. Both are 0.0 where no chat follows another.
        """
        return self._sharing().ratio(of)

    def assert_shared(
        self, min_ratio: float = 0.95, *, of: Literal["shareable", "prompt"] = "shareable"
    ) -> None:
        """Raise AssertionError unless `shared_ratio(of)` is at least `min_ratio`.

        The message names the calls that lost most, why, and what to change. Also fails where no
        chat follows another one of its session: then there was nothing to share.
        """
        __tracebackhide__ = True
        problem = self._sharing().problem(min_ratio, of)
        if problem is not None:
            raise AssertionError(problem)

    def assert_script_used(self) -> None:
        """Raise AssertionError if scripted answers are left, or a call found none."""
        __tracebackhide__ = True
        unused = self._state.script.unused
        left = [f"{count} for {role or 'any role'}" for role, count in unused.items()]
        missing = self._state.unscripted
        if missing:
            raise AssertionError(f"calls without a scripted answer: {'; '.join(missing)}")
        if left:
            raise AssertionError(f"scripted answers that no call asked for: {', '.join(left)}")

    def _sharing(self) -> Sharing:
        return Sharing(self.chats, self._state.layout)
