"""Account: what a call cost, for the client, the metrics and the session's ledger."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prefillshare_server.router.ask import Ask
from prefillshare_server.router.breaks import HEADER, answered, keep
from prefillshare_server.router.fanout import Answer
from prefillshare_server.router.handoff import Handoff, WorkerAccount
from prefillshare_server.router.ledger import Piece, Read, cache
from prefillshare_server.router.parts import Router
from prefillshare_server.router.reply import StreamReply, WholeReply
from prefillshare_server.router.sessions import CallRecord, Session
from prefillshare_server.router.tally import Tally

_KEPT_CHOICES = 4
"""Answers of one call to remember; a client goes on with one of them."""


@dataclass(frozen=True, slots=True)
class Head:
    """What is known once prefill is done: the response headers."""

    headers: Mapping[str, str]


class _New(NamedTuple):
    """A prompt of a call with a session: what it was to the session before."""

    handoff: Handoff
    before: Read
    shared: int
    tail: int
    """Tokens of its tail that are new to the role."""


class Account:
    """Of one call, from the moment its prompts are prefilled. Writes the session's ledger."""

    def __init__(
        self,
        parts: Router,
        ask: Ask,
        session: Session | None,
        handoffs: Sequence[Handoff],
    ) -> None:
        self._tokens = parts.tokens
        self._decode = parts.decode
        self._metrics = parts.metrics
        self._head_first = parts.prompts.head_first
        self._ask = ask
        self._session = session
        self._handoffs = handoffs
        self._tallies = {handoff: Tally() for handoff in handoffs}
        self._reply = StreamReply(ask, len(handoffs)) if ask.stream else WholeReply(ask)
        self._firsts = [handoff for handoff in handoffs if handoff.reader.choice == 0]
        self._prompt_tokens = sum(len(handoff.reader.prompt.ids) for handoff in self._firsts)
        self._cached_tokens: int | None = None
        self._computed_tokens: int | None = None
        self._per_model_tokens = 0
        self._news: list[_New] = []
        self._record: CallRecord | None = None
        self._counted = all(handoff.cached_tokens is not None for handoff in handoffs)
        self._broken = self._firsts[0].reader.prompt.broken
        self._note_prefill()
        if self._counted:
            self._count()

    def head(self) -> Head:
        """The response headers; sent before the first token."""
        report = self._report(())
        headers = {
            "X-Request-Id": self._ask.request_id,
            "X-PrefillShare-Prefill-Worker": report["prefill_worker"],
            "X-PrefillShare-Decode-Worker": report["decode_worker"],
            "X-PrefillShare-Affinity": report["affinity"],
        }
        if self._counted:
            headers["X-PrefillShare-Cached-Tokens"] = str(self._cached_tokens)
            headers["X-PrefillShare-Computed-Tokens"] = str(self._computed_tokens)
        if self._session is not None:
            headers["X-PrefillShare-Session"] = self._session.id
        if self._broken is not None:
            headers[HEADER] = self._broken.header()
        return Head(headers)

    def take(self, handoff: Handoff, answer: Answer) -> Sequence[Answer]:
        """Count a decode worker's answer; returns what of it the client gets now."""
        self._tallies[handoff].add(answer)
        return self._reply.take(handoff, answer)

    async def settled(self) -> Sequence[Answer]:
        """Ask the decode workers what the call cost them, write it down, and finish the reply."""
        attempts = [each for handoff in self._handoffs for each in (handoff, *handoff.later)]
        accounts = await asyncio.gather(*map(self._decode.account, attempts))
        for handoff, account in zip(attempts, accounts, strict=True):
            self._metrics.decoded(self._ask.role, handoff, account)
            if handoff.cached_tokens is None and account.base_tokens_reused is not None:
                handoff.cached_tokens = account.base_tokens_reused
                handoff.computed_tokens = _sum(
                    (account.base_tokens_computed, account.prompt_tokens_computed)
                )
                self._metrics.prefilled(handoff.placed.worker.id, handoff)
        if not self._counted:
            self._count()
        self._note_resumes()
        self._note_decode(accounts)
        return self._reply.finish(self._usage(), self._report(accounts))

    def _count(self) -> None:
        """Add up what was cached and what was computed, as far as it is known."""
        self._cached_tokens = _sum(handoff.cached_tokens for handoff in self._firsts)
        self._computed_tokens = _sum(handoff.computed_tokens for handoff in self._handoffs)
        if self._session is not None:
            self._per_model_tokens = sum(
                _per_model(self._session, new, new.handoff.cached_tokens or 0) for new in self._news
            )
            totals = self._session.totals
            totals.calls += 1
            totals.prompt_tokens += self._prompt_tokens
            totals.per_model_prefill_tokens += self._per_model_tokens
            totals.cached_tokens += self._cached_tokens or 0
            totals.computed_tokens += self._computed_tokens or 0
            self._record = CallRecord(
                index=totals.calls - 1,
                role=self._ask.role,
                prompt_tokens=self._prompt_tokens,
                context_tokens=sum(h.reader.prompt.context_tokens for h in self._firsts),
                shared_tokens=sum(new.shared for new in self._news),
                cached_tokens=self._cached_tokens,
                computed_tokens=self._computed_tokens,
                broken=self._broken_report(),
            )
            self._session.calls.append(self._record)

    def _note_prefill(self) -> None:
        firsts = self._firsts
        self._metrics.placed(firsts[0].placed.affinity)
        session, role = self._session, self._ask.role
        if session is None:
            return
        if self._broken is not None:
            self._metrics.broke(role, self._broken.why.cause)
        if session.last_role not in (None, role):
            self._metrics.switched(session.last_role or "", role)
        session.last_role = role
        session.roles[role] = None
        session.decode_workers[self._ask.decoder.pool] = firsts[0].worker.id
        for handoff in firsts:
            prompt = handoff.reader.prompt
            before = session.ledger.read(
                role, prompt.ids, isolated=self._ask.isolated or self._ask.separate
            )
            shared = session.shared_tokens(before, prompt.ids)
            tail = session.new_in_tail(role, prompt.tail_ids)
            self._news.append(_New(handoff, before, shared, tail))
            handoff.context_end = session.ledger.keep_context(
                prompt.kept, prompt.new_text, prompt.context_ids[prompt.kept_tokens :], role
            )
            self._note_cached(session, handoff.context_end, handoff)
        if self._ask.kind == "chat":
            keep(session, self._ask.body, firsts[0].context_end, whole=self._head_first)

    def _note_cached(self, session: Session, end: Piece | None, handoff: Handoff) -> None:
        where = cache(handoff.placed.worker.id, self._ask.cache_salt)
        session.ledger.mark_cached(end, where)

    def _note_resumes(self) -> None:
        """Count what the attempts after each first one cost the base."""
        for handoff in self._handoffs:
            for again in handoff.later:
                self._computed_tokens = _sum((self._computed_tokens, again.computed_tokens))
                if self._session is not None:
                    self._session.totals.computed_tokens += again.computed_tokens or 0
                    if self._record is not None:
                        self._record.computed_tokens = self._computed_tokens
                    self._session.decode_workers[self._ask.decoder.pool] = again.worker.id
                    self._note_cached(self._session, handoff.context_end, again)

    def _note_decode(self, accounts: Sequence[WorkerAccount]) -> None:
        session = self._session
        if session is None:
            return
        session.totals.handoff_bytes += _sum(account.handoff_bytes for account in accounts) or 0
        session.totals.generated_tokens += sum(t.generated_tokens for t in self._all())
        if self._ask.kind != "chat":
            return
        first = self._handoffs[0]
        for tally in self._all()[:_KEPT_CHOICES]:
            opener = first.reader.prompt.opener
            session.keep_answer(first.context_end, opener, tally, self._tokens)
            session.history.keep(self._ask.body, answered(tally))

    def _all(self) -> list[Tally]:
        """Tallies in the order of the choices."""
        return [self._tallies[handoff] for handoff in self._handoffs]

    def _usage(self) -> dict[str, Any]:
        """OpenAI's usage: each prompt counts once, whatever n is."""
        first = self._all()[0].usage
        completion = sum(tally.generated_tokens for tally in self._all())
        usage: dict[str, Any] = {
            **first,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            # The decode worker's own details tell what was cached there.
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens or 0},
        }
        if details := first.get("completion_tokens_details"):
            each = [tally.usage.get("completion_tokens_details") or {} for tally in self._all()]
            usage["completion_tokens_details"] = {
                key: _sum(counts.get(key) for counts in each) for key in details
            }
        return usage

    def _broken_report(self) -> dict[str, Any] | None:
        return self._broken.report() if self._broken is not None else None

    def _report(self, accounts: Sequence[WorkerAccount]) -> dict[str, Any]:
        """The `prefillshare` object; counts of decode workers are null where one gave none."""
        return {
            "session": self._session.id if self._session else None,
            "role": self._ask.role,
            "prefill_worker": _names(handoff.placed.worker.id for handoff in self._handoffs),
            "decode_worker": _names(
                (handoff.later or [handoff])[-1].worker.id for handoff in self._handoffs
            ),
            "affinity": self._handoffs[0].placed.affinity,
            "cached_tokens": self._cached_tokens,
            "computed_tokens": self._computed_tokens,
            "per_model_prefill_tokens": self._per_model_tokens if self._session else None,
            "handoff_bytes": _sum(account.handoff_bytes for account in accounts),
            "base_tokens_received": _sum(account.base_tokens_received for account in accounts),
            "base_tokens_reused": _sum(account.base_tokens_reused for account in accounts),
            "decode_prompt_tokens_computed": _sum(
                account.prompt_tokens_computed for account in accounts
            ),
            "resumed": sum(len(handoff.later) for handoff in self._handoffs),
            "break": self._broken_report(),
        }


def _per_model(session: Session, new: _New, cached: int) -> int:
    """What a prefill worker of the role's own would have computed of a prompt."""
    end, length = new.handoff.context_end, new.handoff.reader.prompt.context_tokens
    found = max(cached - max(new.shared, length), 0)
    if end is None:
        return max(new.tail - found, 0)
    # Another role may have brought the same tail, and found it.
    found = end.tail_found = max(found, min(end.tail_found, cached - length))
    computed = session.ledger.first_read(end, new.before, cached, new.shared)
    return computed + max(new.tail - found, 0)


def _sum(counts: Iterable[int | None]) -> int | None:
    """Sum of the known counts; None if none is known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _names(ids: Iterable[str]) -> str:
    """Each worker once, in order."""
    return ",".join(dict.fromkeys(ids))
