"""Sends a workload to a system and notes what came when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from urllib.parse import quote

import aiohttp

from prefillshare_bench.records import CallRecord, Replay
from prefillshare_bench.sse import CallFailed, Stream
from prefillshare_bench.traces import Call, Context, RecordedCall, Session, Workload

CALL_S = 3600.0
SILENCE_S = CALL_S
CONNECT_S = 30.0
END_S = 60.0
LONGEST_ID = 200
"""Characters; the router takes a few more."""

_REPLAYED = ("messages", "tools", "chat_template_kwargs")
"""Of a recorded request: what the prompt is made of. The rest would end answers before their time,
ask for several of them, or was for another server."""


async def replay(
    workload: Workload,
    urls: Mapping[str, Sequence[str]],
    *,
    rate: float | None = None,
    limit: int | None = None,
    router: bool = False,
    next_role: bool = False,
    on_call: Callable[[CallRecord], None] | None = None,
    call_s: float = CALL_S,
    silence_s: float = SILENCE_S,
) -> Replay:
    """Run every session once, each call after the one before it.

    With a `rate` sessions arrive as the workload has it, `rate` a second (open loop); else the next
    one begins when one of `limit` has ended (closed loop). With both, sessions that arrive while
    `limit` of them run wait here, and that counts as part of their latency.

    `urls` are of the servers that serve a role; a session keeps to one of them. With `router` its
    sessions are ended there; `next_role` tells it who is called next. A call that fails, or says
    nothing for `silence_s`, or takes `call_s`, ends its session and is recorded: nothing is
    repeated. Raises ValueError for a workload that these servers cannot be sent.
    """
    if rate is None and limit is None:
        raise ValueError("neither rate nor limit is given; set one of them")
    if rate is not None and rate <= 0:
        raise ValueError(f"rate is {rate}; sessions per second are more than 0")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; at least one session has to run")
    if missing := [role for role in workload.roles if not urls.get(role)]:
        raise ValueError(f"urls has none for {', '.join(missing)}; name a server for each role")
    timeout = aiohttp.ClientTimeout(total=call_s, sock_connect=CONNECT_S, sock_read=silence_s)
    # A connection that a server closes just as a call goes out on it would look like a failure.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        run = _Run(
            workload=workload,
            urls=urls,
            http=http,
            rate=rate,
            gate=asyncio.Semaphore(limit) if limit is not None else nullcontext(),
            router=router,
            next_role=next_role,
            on_call=on_call,
        )
        async with asyncio.TaskGroup() as group:
            for number, session in enumerate(workload.sessions):
                group.create_task(run.session(number, session))
    return Replay(run.calls, max((call.last_s for call in run.calls), default=0.0))


@dataclass
class _Run:
    workload: Workload
    urls: Mapping[str, Sequence[str]]
    http: aiohttp.ClientSession
    rate: float | None
    gate: AbstractAsyncContextManager[Any]
    router: bool
    next_role: bool
    on_call: Callable[[CallRecord], None] | None
    calls: list[CallRecord] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def now(self) -> float:
        return time.perf_counter() - self.began

    async def session(self, number: int, session: Session) -> None:
        arrived = None
        if self.rate is not None:
            arrived = (session.arrival - self.workload.sessions[0].arrival) / self.rate
            await asyncio.sleep(arrived - self.now())
        async with self.gate:
            ended = False
            try:
                ended = await self._calls(
                    number, session, self.now() if arrived is None else arrived
                )
            finally:
                if self.router and not ended:
                    await self._end(number, session)

    async def _calls(self, number: int, session: Session, arrived: float) -> bool:
        """Whether all went well; then the router has ended the session with its last call."""
        context = Context(self.workload, session)
        for index, call in enumerate(session.calls):
            attempt = await self._call(number, session, index, context)
            record = self._record(session, index, attempt, arrived)
            self.calls.append(record)
            if self.on_call is not None:
                self.on_call(record)
            if not record.ok:
                return False
            if isinstance(call, Call):
                context.answered(index, attempt.stream.ids)
            arrived = self.now()
        return True

    async def _call(self, number: int, session: Session, index: int, context: Context) -> _Attempt:
        """Send one call. Whatever goes wrong is in what it returns."""
        call = session.calls[index]
        attempt = _Attempt(self._url(number, call.role))
        path, body = _request(call, index, context)
        attempt.sent = self.now()
        try:
            async with self.http.post(
                attempt.url + path, json=body, headers=self._headers(session, index)
            ) as response:
                attempt.status = response.status
                attempt.headers = response.headers
                await attempt.stream.take(response)
            attempt.error = _incomplete(attempt.stream, call)
        except TimeoutError as reason:
            attempt.error = f"timeout: {str(reason) or 'the call took too long'}"
        except (CallFailed, aiohttp.ClientError, OSError) as reason:
            attempt.error = str(reason) or type(reason).__name__
        return attempt

    def _record(
        self, session: Session, index: int, attempt: _Attempt, arrived: float
    ) -> CallRecord:
        stream, usage, report = attempt.stream, attempt.stream.usage, attempt.stream.report
        prompt = usage.get("prompt_tokens")
        cached = report.get("cached_tokens")
        if cached is None and usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        computed = report.get("computed_tokens")
        if computed is None and prompt is not None and cached is not None:
            computed = prompt - cached
        failed = attempt.error is not None or stream.last is None
        return CallRecord(
            session=session.id,
            index=index,
            role=session.calls[index].role,
            arrived_s=arrived,
            sent_s=attempt.sent,
            first_s=None if stream.first is None else stream.first - self.began,
            last_s=self.now() if failed or stream.last is None else stream.last - self.began,
            itl_ms=[round(gap, 3) for gap in stream.gaps_ms],
            prompt_tokens=prompt,
            cached_tokens=cached,
            computed_tokens=computed,
            generated=stream.tokens,
            handoff_bytes=report.get("handoff_bytes"),
            prefill_worker=attempt.worker("prefill"),
            decode_worker=attempt.worker("decode"),
            status=attempt.status,
            error=attempt.error,
            ids=tuple(stream.ids) or None,
        )

    def _headers(self, session: Session, index: int) -> dict[str, str]:
        headers = {"X-Session-ID": self._id(session)}
        if index + 1 == len(session.calls):
            headers["X-Session-Final"] = "true"
        elif self.next_role:
            headers["X-PrefillShare-Next-Role"] = session.calls[index + 1].role
        return headers

    def _id(self, session: Session) -> str:
        """A recorded session may have any name, a header may not."""
        name = quote(f"{self.workload.name}-{self.workload.seed}-{session.id}")
        return name if len(name) <= LONGEST_ID else sha256(name.encode()).hexdigest()

    def _url(self, number: int, role: str) -> str:
        """Sessions take turns, so that the replicas of a role have equally many."""
        urls = self.urls[role]
        return urls[number % len(urls)].rstrip("/")

    async def _end(self, number: int, session: Session) -> None:
        url = self._url(number, session.calls[0].role)
        with suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with (
                asyncio.timeout(END_S),
                self.http.delete(f"{url}/v1/sessions/{quote(self._id(session), safe='')}"),
            ):
                pass


@dataclass
class _Attempt:
    """One call on its way. `sent` is in seconds since the run began."""

    url: str
    sent: float = 0.0
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: Stream = field(default_factory=Stream)
    error: str | None = None

    def worker(self, phase: str) -> str:
        """Which worker did this; a server that does not tell is one itself."""
        told = self.stream.report.get(f"{phase}_worker")
        return told or self.headers.get(f"X-PrefillShare-{phase.title()}-Worker") or self.url


def _request(call: Call | RecordedCall, index: int, context: Context) -> tuple[str, dict[str, Any]]:
    """Path and body: `call.answer` tokens, greedy, whatever the model has to say."""
    options = {
        "model": call.role,
        "max_tokens": call.answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if isinstance(call, Call):
        return "/v1/completions", {"prompt": context.prompt(index), **options}
    logged = {name: call.request[name] for name in _REPLAYED if name in call.request}
    if logged.get("tools"):
        # The tools stay in the prompt, and no parser is needed, which stock vLLM may not have.
        options["tool_choice"] = "none"
    return "/v1/chat/completions", logged | options


def _incomplete(stream: Stream, call: Call | RecordedCall) -> str | None:
    """What is wrong with an answer that came to its end, if anything."""
    if stream.tokens != call.answer:
        return (
            f"{stream.tokens} tokens were generated and not {call.answer} "
            f"(finish_reason {stream.finished!r})"
        )
    if isinstance(call, Call) and len(stream.ids) != call.answer:
        return "the server sent no token ids; it has to know return_token_ids"
    return None
