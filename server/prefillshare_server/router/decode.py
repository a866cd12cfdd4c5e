"""Decode: a role's decoder reads the handed-off KV, processes the last prompt token, generates."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import fields
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

from prefillshare_server.config import Timeouts
from prefillshare_server.router import sse
from prefillshare_server.router.ask import Ask, salted
from prefillshare_server.router.errors import (
    RouterError,
    WorkerBrokeOff,
    WorkerRefused,
    WorkerSilent,
    WorkerUnreachable,
    decode_aborted,
    timed_out,
    worker_failed,
)
from prefillshare_server.router.fanout import Answer
from prefillshare_server.router.handoff import Handoff, WorkerAccount
from prefillshare_server.router.health import Health
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.router.workers import Workers
from prefillshare_server.vllm_plugin.account import EVENT_MARK

logger = logging.getLogger(__name__)

_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_OURS = frozenset(
    {
        "base_kv_mismatch",
        "base_kv_missing",
        "base_kv_unusable",
        "generated_ids_invalid",
        "handoff_taken",
        "one_answer_per_handoff",
        "prompt_mismatch",
    }
)
"""Refusals of a decode worker that no client can have caused."""

_ACCOUNT_S = 2.0


class Interrupted(Exception):
    """An answer broke off that can go on from a new handoff."""

    def __init__(
        self,
        error: RouterError,
        *,
        partial: Answer | None = None,
        lost: bool = False,
        silent: bool = False,
    ) -> None:
        super().__init__(str(error))
        self.error = error
        """What the client gets if the answer does not go on."""
        self.partial = partial
        """The whole answer up to here, of a call that is not streamed."""
        self.lost = lost
        """The worker did not end the call itself: it may be dead, or still at it."""
        self.silent = silent
        """The worker took too long."""


class Decode:
    """Runs handoffs on decode workers. Never repeats one: a handoff feeds exactly one reader."""

    def __init__(
        self,
        workers: Workers,
        health: Health,
        metrics: Metrics,
        timeouts: Timeouts,
        *,
        max_model_len: int,
    ) -> None:
        self._workers = workers
        self._health = health
        self._metrics = metrics
        self._timeouts = timeouts
        self._max_model_len = max_model_len
        self.patience_s_per_token = 1.0
        """For a whole answer, on top of the first token: it cannot be watched token by token. More
        than the slowest worker takes; one that does not run at all is noticed earlier."""

    async def answers(
        self, ask: Ask, handoff: Handoff, generated: Sequence[int] = ()
    ) -> AsyncGenerator[Answer, None]:
        """Yield the worker's answer: chunks as they come for a stream, else the whole as one.

        The answer begins with `generated`, which earlier attempts had brought it to. Closing the
        generator aborts the request at the worker. Raises Interrupted where another attempt can go
        on, and RouterError where the request itself is refused.
        """
        worker = handoff.worker
        body = self._body(ask, handoff, generated)
        run = self._chunks if ask.stream else self._whole
        source = run(ask, handoff, body)
        finished = False
        handoff.taken = True
        try:
            async for answer in source:
                for choice in answer.get("choices") or ():
                    if await self._broke_off(choice, handoff):
                        if ask.stream and choice.get("token_ids"):
                            yield _only_tokens(answer)
                        partial = None if ask.stream else answer
                        raise self._gave_up(handoff, choice.get("stop_reason"), partial)
                    finished = finished or choice.get("finish_reason") is not None
                handoff.over = finished
                yield answer
        except WorkerRefused as error:
            _uncover(error)
            handoff.taken = isinstance(error, WorkerBrokeOff) or _may_be_read(error)
            raise self._classified(error, handoff) from error
        except (WorkerUnreachable, WorkerSilent) as error:
            handoff.taken = not (isinstance(error, WorkerUnreachable) and not error.sent)
            self._health.failed(worker, error)
            if not finished:
                raise self._lost(error, handoff) from error
            # Only the usage is missing, which the router counts as well.
        finally:
            await source.aclose()
        if not finished:
            # vLLM drops the last chunk of a stream that ends before its first token.
            account = await self.account(handoff)
            raise self._gave_up(handoff, account.event and EVENT_MARK + account.event, None)
        self._health.succeeded(worker)

    async def _broke_off(self, choice: Mapping[str, Any], handoff: Handoff) -> bool:
        """Whether the worker ended the call before its end.

        In an answer that is not streamed vLLM calls it "tool_calls" all the same once one call was
        complete; then only its account tells whether the worker gave the call up or was shut down.
        """
        reason = choice.get("finish_reason")
        if reason == "abort" or str(choice.get("stop_reason")).startswith(EVENT_MARK):
            return True
        if reason != "tool_calls" or "message" not in choice:
            return False
        account = await self.account(handoff)
        return account.event is not None or account == WorkerAccount()

    async def account(self, handoff: Handoff) -> WorkerAccount:
        """The worker's own account of a finished call."""
        if handoff.account is not None:
            return handoff.account
        if handoff.lost:
            return WorkerAccount()
        worker = handoff.worker
        try:
            found = await self._told(handoff)
        except RouterError as error:
            logger.warning("no account of a call from %s: %s", worker.id, error)
            return WorkerAccount()
        told = {field.name: found.get(field.name) for field in fields(WorkerAccount)}
        handoff.account = WorkerAccount(**told)
        return handoff.account

    async def _told(self, handoff: Handoff) -> Mapping[str, Any]:
        """Ask for the account; once more where no answer came, or none in time."""
        retrying = AsyncRetrying(
            stop=stop_after_attempt(2),
            retry=retry_if_exception_type((WorkerSilent, WorkerUnreachable)),
            reraise=True,
        )
        found: Mapping[str, Any] = await retrying(
            self._workers.json,
            "GET",
            handoff.worker,
            f"/prefillshare/calls/{handoff.request_id}",
            phase="decode",
            timeout_s=_ACCOUNT_S,
        )
        return found

    def _body(self, ask: Ask, handoff: Handoff, generated: Sequence[int]) -> dict[str, Any]:
        reader = handoff.reader
        body = {
            **ask.body,
            "model": ask.decoder.model,
            "n": 1,
            "return_token_ids": True,
            "kv_transfer_params": dict(handoff.params),
        }
        if generated:
            ours = {**handoff.params["prefillshare"], "generated_ids": generated}
            body["kv_transfer_params"]["prefillshare"] = ours
        body.pop("best_of", None)
        body |= salted(ask.cache_salt)
        if body.get("include_reasoning") is False:
            body["include_reasoning"] = True  # vLLM hides token ids with it; see reply.py.
        if ask.kind == "chat":
            body["kv_transfer_params"]["prompt_token_ids"] = reader.prompt.ids
        else:
            body["prompt"] = reader.prompt.ids
        if isinstance(body.get("seed"), int):
            body["seed"] += reader.choice
        if ask.stream:
            options = dict(body.get("stream_options") or {})
            if not ask.include_usage:
                # It has no effect without include_usage, which is only asked for the account.
                options.pop("continuous_usage_stats", None)
            body["stream_options"] = {**options, "include_usage": True}
        return body

    async def _chunks(
        self, ask: Ask, handoff: Handoff, body: dict[str, Any]
    ) -> AsyncGenerator[Answer, None]:
        worker, first_s = handoff.worker, self._timeouts.first_token_s
        started = generating = False
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(first_s):
                    response = await stack.enter_async_context(
                        self._workers.request(
                            "POST",
                            worker,
                            _PATHS[ask.kind],
                            phase="decode",
                            body=body,
                            request_id=handoff.request_id,
                        )
                    )
                decoding = sse.decode(
                    response.content.iter_any(),
                    first_s=first_s,
                    next_s=self._timeouts.idle_stream_s,
                )
                events = await stack.enter_async_context(aclosing(decoding))
                async for event in events:
                    started = True
                    if "error" in event:
                        # vLLM refuses some requests inside a stream that it has opened.
                        refused = WorkerBrokeOff if generating else WorkerRefused
                        raise refused(worker.id, _status(event["error"]), event)
                    generating = generating or bool(event.get("choices"))
                    yield event
            except TimeoutError:
                if started:
                    raise timed_out(
                        "idle_stream", worker.id, self._timeouts.idle_stream_s
                    ) from None
                raise timed_out("first_token", worker.id, first_s) from None
            except ValueError as error:
                raise WorkerUnreachable(worker.id, "decode", f"its stream broke: {error}") from None

    async def _whole(
        self, ask: Ask, handoff: Handoff, body: dict[str, Any]
    ) -> AsyncGenerator[Answer, None]:
        room = self._max_model_len - len(handoff.reader.prompt.ids)
        most = min(ask.max_tokens or room, room)
        answering = asyncio.create_task(
            self._workers.json(
                "POST",
                handoff.worker,
                _PATHS[ask.kind],
                phase="decode",
                timeout_s=self._timeouts.first_token_s + self.patience_s_per_token * most,
                body=body,
                request_id=handoff.request_id,
            )
        )
        try:
            await self._answered(answering, handoff.worker)
            yield answering.result()
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _answered(self, answering: asyncio.Task[Any], worker: WorkerEndpoint) -> None:
        """Wait for a whole answer for as long as its worker answers the router's probes."""
        silence_s = self._timeouts.idle_stream_s
        while not (await asyncio.wait({answering}, timeout=silence_s))[0]:
            if self._health.failing(worker.id):
                raise timed_out("idle_stream", worker.id, silence_s)

    def _gave_up(
        self, handoff: Handoff, stop_reason: object, partial: Answer | None
    ) -> Interrupted:
        """The worker ended the call rather than compute prompt KV itself."""
        event = str(stop_reason or "").removeprefix(EVENT_MARK) or None
        error = decode_aborted(handoff.worker.id, event)
        self._metrics.decode_gave_up(handoff, error.code or "")
        if event in ("kv_load_failed", "handoff_timeout"):
            handoff.unreadable = True
            self._health.failed(handoff.placed.worker, error)
        if event in ("kv_load_failed", "lease_expired"):
            handoff.taken = False  # It does not read, and did not tell the prefill worker so.
        else:
            handoff.over = event is not None
        return Interrupted(error, partial=partial)

    def _lost(self, error: RouterError, handoff: Handoff) -> Interrupted:
        handoff.lost = True
        return Interrupted(error, lost=True, silent=error.status == 504)

    def _classified(self, error: WorkerRefused, handoff: Handoff) -> Exception:
        """What the client got wrong is passed on; where the worker failed, another may do."""
        if error.code == "lease_expired":
            return self._gave_up(handoff, error.code, None)
        if error.status < 500 and error.code not in _OURS:
            return error
        self._metrics.handoff_failed(error.code or "decode_failed")
        failed = worker_failed(error, handoff.worker.id, "decode")
        if error.status < 500:
            return failed
        self._health.failed(handoff.worker, failed)
        return self._lost(failed, handoff)


def _only_tokens(chunk: Answer) -> Answer:
    """A chunk that ends an attempt, without its end and its text.

    Under load vLLM puts the last tokens and the end into one chunk. What the text would be if the
    answer went on is not known there: vLLM no longer waits for a stop string to be complete.
    """
    [choice] = chunk["choices"]
    said: dict[str, Any] = {"delta": {}} if "delta" in choice else {"text": ""}
    return {**chunk, "choices": [{**choice, **said, "finish_reason": None, "stop_reason": None}]}


def _uncover(refused: WorkerRefused) -> None:
    """Set the code of a refusal by the engine, which stands in front of vLLM's message."""
    code = refused.message.partition(":")[0]
    if refused.code not in _OURS and code in _OURS:
        refused.code = code


def _may_be_read(refused: WorkerRefused) -> bool:
    """Whether the handoff of a refused request may be in a reader's hands all the same."""
    if refused.code == "handoff_taken":
        return True
    return refused.status >= 500 and refused.code != "lease_expired"


def _status(error: object) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500
