"""Prefill ahead: the base reads a session's context before any role is called.

It runs in the background. A call of the session waits for it, so nothing is computed twice, and
goes on without it if it takes too long or fails.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from prefillshare_server.models.messages import SYSTEM_ROLES
from prefillshare_server.router import ask as asked
from prefillshare_server.router.breaks import HEADER, keep
from prefillshare_server.router.colocated import Colocated
from prefillshare_server.router.errors import (
    RouterError,
    bad_request,
    too_many_prefills,
    unknown_session,
)
from prefillshare_server.router.handoff import Computed, Prompt
from prefillshare_server.router.identity import Identity, checked
from prefillshare_server.router.ledger import Piece, cache
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.placement import Placed
from prefillshare_server.router.prefill import Prefill
from prefillshare_server.router.prompt import Prompts
from prefillshare_server.router.session_limit import SessionLimit
from prefillshare_server.router.sessions import Running, Session, Sessions

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 64
"""Prefills ahead of one session that run or wait; each holds its whole request."""


@dataclass(frozen=True, slots=True)
class AheadAsk:
    """One request for a prefill ahead."""

    who: Identity
    body: Mapping[str, Any]
    wait: bool
    strict: bool


class Noted(NamedTuple):
    """A prefill ahead that the session's ledger knows, and that has its worker."""

    prompt: Prompt
    placed: Placed
    end: Piece | None
    """Where the ledger keeps it."""


def parse(session_id: str, raw: bytes, headers: Mapping[str, str]) -> AheadAsk:
    """Read a request. The session is the path's, whatever `headers` or the body name.

    Raises RouterError(400) naming the field.
    """
    body = asked.json_object(raw)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a non-empty list of messages", "messages")
    first = messages[0]
    if isinstance(first, Mapping) and first.get("role") in SYSTEM_ROLES:
        raise bad_request(
            f"messages[0] is a leading {first['role']} message: it is a role's own and stands "
            "behind the context, so it cannot be prefilled for all roles; leave it out",
            "messages",
        )
    if body.get("tools"):
        raise bad_request(
            "tools are a role's own and stand behind the context, so they cannot be prefilled for "
            "all roles; leave them out",
            "tools",
        )
    if asked.isolated(headers, body):
        raise bad_request(
            "with x-prefillshare-mode: isolate each role has KV of its own, and a prefill ahead "
            "serves no role; leave out one of them",
            "x-prefillshare-mode",
        )
    parent = headers.get("x-parent-session-id") or None
    return AheadAsk(
        who=Identity(
            session=checked(session_id, "id"),
            parent=None if parent is None else checked(parent, "x-parent-session-id"),
            final=False,
        ),
        body=body,
        wait=asked.flag(body.get("wait"), "wait"),
        strict=asked.strict(headers),
    )


class Ahead:
    """Runs prefills ahead, those of one session in the order they came."""

    def __init__(
        self,
        sessions: Sessions,
        limit: SessionLimit,
        prompts: Prompts,
        prefill: Prefill | Colocated,
        metrics: Metrics,
        *,
        patience_s: float,
        separate: bool,
    ) -> None:
        """`patience_s` is how long a call, or a later prefill ahead, waits for an earlier one;
        `separate` says that roles share no KV."""
        self._separate = separate
        self._sessions = sessions
        self._limit = limit
        self._prompts = prompts
        self._prefill = prefill
        self._metrics = metrics
        self._patience_s = patience_s
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, ask: AheadAsk) -> tuple[dict[str, Any], dict[str, str]]:
        """The answer's body and headers, once the prefill is on its way, or over if so asked.

        Raises RouterError: 400 for a context that cannot be prefilled, under layouts that render
        the head first, and where roles share no KV, 422 for a break where none is allowed, 429 and
        504 where there are too many sessions, 503 without a worker; with `wait` also what became of
        the prefill.
        """
        if self._prompts.head_first:
            raise bad_request(
                "with layout.kind: model each role's instructions and tools stand in front of the "
                "conversation, so nothing can be prefilled for all roles; leave the prefill out, "
                "or serve with layout.kind: context-first",
                "messages",
            )
        if self._separate:
            raise bad_request(
                "with prefill.pool or prefill.reuse: per_role each role has KV of its own, and a "
                "prefill ahead serves no role; leave the prefill out",
                "messages",
            )
        # The order of arrival counts, so there is no await before the session knows of it, unless
        # it has to wait for a place, in the order of arrival too.
        stack = ExitStack()
        stack.enter_context(await self._limit.entered(ask.who))
        session = stack.enter_context(self._sessions.opened(ask.who))
        assert session is not None, "a prefill ahead has a session"
        if session.prefills_running >= MOST_AT_ONCE:
            stack.close()
            raise too_many_prefills(session.id, MOST_AT_ONCE)
        stack.enter_context(_counted(session))
        noted: asyncio.Future[Noted] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(ask, session, session.ahead, noted))
        session.ahead = running = Running(noted, task)
        self._tasks.add(task)

        def over(_: object) -> None:
            # Here, for a task that is cancelled before it begins runs no line of its own.
            self._tasks.discard(task)
            noted.cancel()
            if session.ahead is running:
                session.ahead = None
            stack.close()

        task.add_done_callback(over)
        # Waiting for it never cancels it: a call may be waiting for it as well.
        await asyncio.wait([noted])
        prompt, placed, _ = noted.result()
        computed: Computed | None = None
        if ask.wait:
            await asyncio.wait([task])
            result = task.result()
            if isinstance(result, RouterError):
                raise result
            computed = result
        broken = prompt.broken
        return {
            "id": session.id,
            "object": "prefillshare.prefill",
            "prefill_worker": computed.worker.id if computed else placed.worker.id,
            "affinity": placed.affinity,
            "prompt_tokens": len(prompt.ids),
            "cached_tokens": computed and computed.cached_tokens,
            "computed_tokens": computed and computed.computed_tokens,
            "break": broken.report() if broken else None,
        }, {HEADER: broken.header()} if broken else {}

    async def finished(self, session: Session | None) -> float:
        """Wait, but not for ever, for what runs ahead of a call; returns for how many seconds."""
        if session is None or session.ahead is None or session.ahead.task.done():
            return 0.0
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.wait([session.ahead.task], timeout=self._patience_s)
        waited_s = loop.time() - start
        self._metrics.waited_for_prefill(waited_s)
        return waited_s

    async def close(self) -> None:
        """End what runs."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self,
        ask: AheadAsk,
        session: Session,
        before: Running | None,
        noted: asyncio.Future[Noted],
    ) -> Computed | RouterError | None:
        """Raises no RouterError: what goes wrong is the result, for whoever waits for it."""
        try:
            if before is not None:
                await asyncio.wait([before.noted])
            ahead = await self._noted(ask, session)
        except Exception as error:
            noted.set_exception(error)
            return None
        noted.set_result(ahead)
        if before is not None:
            await asyncio.wait([before.task], timeout=self._patience_s)
        if not self._sessions.holds(session):
            # It ended while this waited: nobody will call with the context.
            gone = unknown_session(session.id)
            self._metrics.prefilled_ahead(gone.code or "")
            return gone
        return await self._computed(ask, session, ahead)

    async def _noted(self, ask: AheadAsk, session: Session) -> Noted:
        prompt = await self._prompts.context(ask.body, session)
        if prompt.broken is not None:
            self._metrics.broke("", prompt.broken.why.cause)
            if ask.strict and prompt.broken.why.is_loss:
                raise prompt.broken.error()
        placed = self._prefill.reserve(session)
        end = session.ledger.keep_context(
            prompt.kept, prompt.new_text, prompt.ids[prompt.kept_tokens :], None
        )
        keep(session, ask.body, end, whole=False)
        return Noted(prompt, placed, end)

    async def _computed(
        self, ask: AheadAsk, session: Session, ahead: Noted
    ) -> Computed | RouterError:
        prompt, placed, end = ahead
        salt = ask.body.get("cache_salt")
        before = session.ledger.read(None, prompt.ids)
        try:
            computed = await self._prefill.ahead(
                session, prompt.ids, cache_salt=salt, at=placed.worker
            )
        except RouterError as error:
            logger.warning("a prefill ahead of session %r failed: %s", session.id, error)
            self._metrics.prefilled_ahead(error.code or "prefill_failed")
            if end is not None:
                session.ledger.forget(end)
            home = placed.worker.id
            vain = not session.ledger.cached(prompt.ids, cache(home, salt))
            if placed.affinity == "new" and vain and session.prefill_worker == home:
                self._sessions.unbind(session)
            return error
        self._metrics.prefilled_ahead("ok")
        self._metrics.prefilled(computed.worker.id, computed)
        session.totals.prefills_ahead += 1
        session.totals.computed_tokens += computed.computed_tokens
        session.ledger.mark_cached(end, cache(computed.worker.id, salt))
        if end is not None and not end.roles:
            shared = session.shared_tokens(before, prompt.ids)
            session.ledger.first_read(end, before, computed.cached_tokens, shared)
        return computed


@contextmanager
def _counted(session: Session) -> Iterator[None]:
    session.prefills_running += 1
    try:
        yield
    finally:
        session.prefills_running -= 1
