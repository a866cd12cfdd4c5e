"""Decode: a role's decoder reads the handed-off KV, processes the last prompt token, generates."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from prefillshare_server.config import Timeouts
from prefillshare_server.router import sse
from prefillshare_server.router.ask import Ask
from prefillshare_server.router.errors import (
    RouterError,
    WorkerBrokeOff,
    WorkerRefused,
    WorkerUnreachable,
    decode_aborted,
    timed_out,
    worker_failed,
)
from prefillshare_server.router.fanout import Answer
from prefillshare_server.router.handoff import Handoff
from prefillshare_server.router.metrics import Metrics
from prefillshare_server.router.topology import WorkerEndpoint
from prefillshare_server.router.workers import Workers

logger = logging.getLogger(__name__)

_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_OURS = frozenset(
    {
        "base_kv_mismatch",
        "base_kv_missing",
        "base_kv_unusable",
        "handoff_taken",
        "one_answer_per_handoff",
        "prompt_mismatch",
    }
)
"""Refusals of a decode worker that no client can have caused."""

_ACCOUNT_S = 2.0
_RELEASE_S = 10.0

_EVENT_MARK = "prefillshare:"
"""Prefix of a decode worker's stop_reason when it gave the call up."""


@dataclass(frozen=True, slots=True)
class WorkerAccount:
    """A decode worker's account of one call; None where it gave none."""

    base_tokens_received: int | None = None
    base_tokens_reused: int | None = None
    prompt_tokens_computed: int | None = None
    handoff_bytes: int | None = None
    event: str | None = None


class Decode:
    """Runs handoffs on decode workers. Never repeats one: a handoff feeds exactly one reader."""

    def __init__(
        self,
        workers: Workers,
        metrics: Metrics,
        timeouts: Timeouts,
        *,
        max_model_len: int,
        unreachable: Callable[[WorkerEndpoint], None],
    ) -> None:
        self._workers = workers
        self._unreachable = unreachable
        """Told of a worker that could not be reached, so that others are preferred for a while."""
        self._metrics = metrics
        self._timeouts = timeouts
        self._max_model_len = max_model_len
        self._releasing: set[asyncio.Task[None]] = set()
        self.patience_s_per_token = 1.0
        """For a whole answer, on top of the first token: it cannot be watched token by token."""

    async def answers(self, ask: Ask, handoff: Handoff) -> AsyncGenerator[Answer, None]:
        """Yield the worker's answer: chunks as they come for a stream, else the whole as one.

        Closing the generator aborts the request at the worker. Raises RouterError if the worker
        refuses, fails, falls silent, or gives the call up.
        """
        body = self._body(ask, handoff)
        run = self._chunks if ask.stream else self._whole
        source = run(ask, handoff, body)
        finished = False
        # From here on the worker answers for the lease: it ends it when the request is aborted.
        handoff.taken = True
        try:
            async for answer in source:
                for choice in answer.get("choices") or ():
                    if choice.get("finish_reason") == "abort":
                        self._gave_up(handoff, choice.get("stop_reason"))
                    finished = finished or choice.get("finish_reason") is not None
                yield answer
        except WorkerRefused as error:
            handoff.taken = isinstance(error, WorkerBrokeOff)
            self._classify(error, handoff)
        except WorkerUnreachable:
            self._unreachable(handoff.reader.worker)
            raise
        finally:
            await source.aclose()
        if not finished:
            # vLLM drops the last chunk of a stream that ends before its first token.
            account = await self.account(handoff)
            self._gave_up(handoff, account.event and _EVENT_MARK + account.event)

    async def account(self, handoff: Handoff) -> WorkerAccount:
        """The worker's own account of a finished call. Reading removes it there."""
        reader = handoff.reader
        try:
            found = await self._workers.json(
                "GET",
                reader.worker,
                f"/prefillshare/calls/{reader.request_id}",
                phase="decode",
                timeout_s=_ACCOUNT_S,
            )
        except RouterError as error:
            logger.warning("no account of a call from %s: %s", reader.worker.id, error)
            return WorkerAccount()
        return WorkerAccount(**{f.name: found.get(f.name) for f in fields(WorkerAccount)})

    def release(self, handoff: Handoff) -> None:
        """Give back, in the background, a lease that no decode worker took.

        A decode worker passes it on, since only readers can tell a prefill worker. If that fails,
        the lease ends by itself.
        """
        task = asyncio.create_task(self._release(handoff))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def close(self) -> None:
        """Wait for releases under way."""
        await asyncio.gather(*self._releasing)

    async def _release(self, handoff: Handoff) -> None:
        try:
            async with (
                asyncio.timeout(_RELEASE_S),
                self._workers.request(
                    "POST",
                    handoff.reader.worker,
                    "/prefillshare/release",
                    phase="decode",
                    body={"kv_transfer_params": handoff.params},
                ),
            ):
                return
        except (RouterError, TimeoutError) as error:
            logger.warning("a lease on %s is left to end: %s", handoff.placed.worker.id, error)

    def _body(self, ask: Ask, handoff: Handoff) -> dict[str, Any]:
        reader = handoff.reader
        body = {
            **ask.body,
            "model": reader.worker.model,
            "n": 1,
            "return_token_ids": True,
            "kv_transfer_params": dict(handoff.params),
        }
        body.pop("best_of", None)
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
        worker, first_s = handoff.reader.worker, self._timeouts.first_token_s
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
                            request_id=handoff.reader.request_id,
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

    async def _whole(
        self, ask: Ask, handoff: Handoff, body: dict[str, Any]
    ) -> AsyncGenerator[Answer, None]:
        reader = handoff.reader
        room = self._max_model_len - len(reader.prompt.ids)
        most = min(ask.max_tokens or room, room)
        answer = await self._workers.json(
            "POST",
            reader.worker,
            _PATHS[ask.kind],
            phase="decode",
            timeout_s=self._timeouts.first_token_s + self.patience_s_per_token * most,
            body=body,
            request_id=reader.request_id,
        )
        yield answer

    def _gave_up(self, handoff: Handoff, stop_reason: object) -> NoReturn:
        event = str(stop_reason or "").removeprefix(_EVENT_MARK) or None
        error = decode_aborted(handoff.reader.worker.id, event)
        self._metrics.decode_gave_up(handoff, error.code or "")
        raise error

    def _classify(self, error: WorkerRefused, handoff: Handoff) -> NoReturn:
        """Pass on what the client got wrong; say which worker failed otherwise."""
        if error.code == "lease_expired":
            self._gave_up(handoff, error.code)
        if error.status >= 500 or error.code in _OURS:
            self._metrics.handoff_failed(error.code or "decode_failed")
            raise worker_failed(error, handoff.reader.worker.id, "decode") from error
        raise error


def _status(error: object) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500
