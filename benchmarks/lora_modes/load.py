"""Sessions of several roles over a growing context, the same token ids to every system."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from threading import Barrier, Event
from typing import Any

import httpx

TAIL = 48
"""Tokens that only one role's prompts end with in a session: its instructions."""
SHORT_TAIL = 8
"""The same where KV blocks are counted: with some tokens of its answer, less than a block."""
ANSWER = 24
LONG_ANSWER = 400
"""Not over before all roles are in the middle of theirs."""
CALL_S = 1800
_IDS = range(20, 250)
"""Ordinary tokens of any vocabulary: what a prompt costs does not depend on what it says."""


@dataclass(frozen=True)
class Call:
    """What one call took."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    output: Sequence[int]


@dataclass(frozen=True)
class Load:
    """Figures of some sessions that ran at once."""

    ttft_switch_ms: float
    """Median over the calls but the first of each session: each follows another role's."""
    throughput_tok_s: float
    """Generated tokens per second, over all sessions."""
    prefilled_tokens: int
    """Prompt tokens that were not cached."""


def tokens(count: int, *seed: object) -> list[int]:
    """Drawn ids, always the same for the same seed."""
    chance = random.Random(repr(seed))
    return [chance.choice(_IDS) for _ in range(count)]


def call(
    http: httpx.Client, role: str, context: Sequence[int], session: str, *, tail: int = TAIL
) -> Call:
    """One greedy call over a stream."""
    first = 0.0
    output: list[int] = []
    usage: dict[str, Any] = {}
    started = time.perf_counter()
    with _stream(http, role, context, session, tail=tail, answer=ANSWER) as lines:
        for chunk in lines:
            for choice in chunk["choices"]:
                first = first or time.perf_counter()
                output += choice.get("token_ids") or []
            usage = chunk.get("usage") or usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Call(first - started, usage["prompt_tokens"], cached, output)


def run_sessions(
    url: str, roles: Sequence[str], *, sessions: int, calls: int, start: int, end: int, name: str
) -> Load:
    """`sessions` at once, each of `calls` calls by the roles in turn.

    A context of `start` tokens grows to `end`: by each answer, and by new tokens after it.
    """
    step = (end - start) // (calls - 1)

    def session(number: int) -> list[Call]:
        context, made = tokens(start, name, number), []
        with httpx.Client(base_url=url, timeout=CALL_S) as http:
            for turn in range(calls):
                role = roles[turn % len(roles)]
                made.append(call(http, role, context, f"{name}-{number}"))
                new = tokens(max(step - ANSWER, 1), name, number, turn)
                context = [*context, *made[-1].output, *new]
        return made

    started = time.perf_counter()
    with ThreadPoolExecutor(sessions) as pool:
        each = list(pool.map(session, range(sessions)))
    seconds = time.perf_counter() - started
    every = [made for of_session in each for made in of_session]
    return Load(
        round(1000 * median(made.ttft_s for s in each for made in s[1:]), 1),
        round(sum(len(made.output) for made in every) / seconds, 2),
        sum(made.prompt_tokens - made.cached_tokens for made in every),
    )


def prefilled_by(url: str, roles: Sequence[str], context: Sequence[int], name: str) -> int:
    """Prompt tokens computed when each role answers once over one context, one after the other."""
    with httpx.Client(base_url=url, timeout=CALL_S) as http:
        made = [call(http, role, context, name, tail=SHORT_TAIL) for role in roles]
    return sum(each.prompt_tokens - each.cached_tokens for each in made)


@contextmanager
def answering(url: str, roles: Sequence[str], context: Sequence[int], name: str) -> Iterator[None]:
    """Inside the block every role is in the middle of an answer over the same context."""
    begun, done = Barrier(len(roles) + 1), Event()

    def answer(role: str) -> None:
        with (
            httpx.Client(base_url=url, timeout=CALL_S) as http,
            _stream(http, role, context, name, tail=SHORT_TAIL, answer=LONG_ANSWER) as lines,
        ):
            next(lines)
            begun.wait(CALL_S)
            done.wait(CALL_S)

    with ThreadPoolExecutor(len(roles)) as pool:
        running = [pool.submit(answer, role) for role in roles]
        try:
            begun.wait(CALL_S)
            yield
        finally:
            begun.abort()
            done.set()
    for each in running:
        each.result()


@contextmanager
def _stream(
    http: httpx.Client,
    role: str,
    context: Sequence[int],
    session: str,
    *,
    tail: int,
    answer: int,
) -> Iterator[Iterator[dict[str, Any]]]:
    body = {
        "model": role,
        "prompt": [*context, *tokens(tail, role)],
        "max_tokens": answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    headers = {"X-Session-ID": session}
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        if response.is_error:
            raise RuntimeError(f"{response.status_code}: {response.read().decode()}")
        yield _chunks(response.iter_lines())


def _chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            yield chunk
