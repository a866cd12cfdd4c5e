"""Recorded chat requests as a workload: what an agent program really sent.

Reads what `prefillshare lint` reads: the file that `PREFILLSHARE_TRACE` names, and plain logs of
OpenAI requests, one JSON object a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from prefillshare_bench.traces import TAKEN, RecordedCall, Session, Workload
from prefillshare_bench.workloads import arrivals
from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.lint import trace
from prefillshare_server.models.messages import require_text, without_head

ANSWER = 128
"""Tokens of an answer where the log does not say."""
_TIMES = ("time", "timestamp", "ts", "created_at", "created")


class Imported(NamedTuple):
    """What was read of a log."""

    workload: Workload
    rate: float | None
    """Sessions per second as they were logged; None if no line has a time, or all the same one."""
    joined: int
    """Sessions whose requests name none."""
    skipped: int
    """Lines that hold no chat request."""


@dataclass(frozen=True)
class _Request:
    """A line with what it says."""

    line: trace.Line
    said: trace.Recorded
    role: str
    time: float | None
    """Seconds since 1970."""

    @property
    def where(self) -> str:
        return self.line.where

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self.said.body["messages"]
        return found


def recorded(
    paths: Sequence[Path],
    *,
    name: str = "recorded",
    session_key: str | None = None,
    role_key: str = "model",
    answer: int = ANSWER,
    longest_answer: int | None = None,
    seed: int = 0,
) -> Imported:
    """The sessions of a log, in the order of their first requests.

    `session_key` is the field, dotted, that names a request's session where none of the usual ones
    does. Requests that name none join the session whose messages they go on from, whatever system
    messages stand in front. What the field `role_key` of the request or its line says is the role,
    spelt as a cluster file has it. Answers are as long as the logged usage says, else as
    `max_tokens` or `max_completion_tokens`, else `answer` tokens, and never more than
    `longest_answer`. Sessions arrive as logged, on the scale where one comes per unit of time; if
    no line has a time, as a Poisson process drawn with `seed`. Raises ConfigError naming the line
    and the field of whatever cannot be used.
    """
    index = trace.index(paths, session_key=session_key)
    if not index.sessions:
        where = ", ".join(map(str, paths)) or "the trace"
        raise ConfigError(Problem(where, "has no chat requests", "log POST /v1/chat/completions"))
    requests = _in_order(_requests(index, _Roles(role_key)))
    chains = _Chains(set(index.sessions))
    sessions: dict[str, list[_Request]] = {}
    for request in requests:
        session = chains.session(request.line.session, request.role, request.messages)
        sessions.setdefault(session, []).append(request)
    began = _began({session: made[0] for session, made in sessions.items()})
    rate = _rate(began)
    # Mean inter-arrival times, so that a run can have any rate.
    if began is None:
        since = dict(zip(sessions, arrivals(len(sessions), seed), strict=True))
    else:
        first = min(began.values())
        since = {name: round((at - first) * (rate or 1.0), 6) for name, at in began.items()}
    calls = {
        session: tuple(_call(request, answer, longest_answer) for request in made)
        for session, made in sessions.items()
    }
    logged = "" if rate is None else f", {rate:.3g} sessions a second"
    order = sorted(sessions, key=lambda session: since[session])
    workload = Workload(
        name=_named(name),
        seed=seed,
        roles=tuple(dict.fromkeys(call.role for session in order for call in calls[session])),
        about=f"recorded: {len(requests)} chat requests of {len(order)} sessions{logged}",
        sessions=tuple(Session(id=s, arrival=since[s], calls=calls[s]) for s in order),
    )
    return Imported(workload, rate, chains.count, index.skipped)


def _requests(index: trace.Index, roles: _Roles) -> Iterator[_Request]:
    """Each line's, checked. Raises ConfigError for what cannot be sent again."""
    lines = sorted((line for s in index.sessions.values() for line in s), key=lambda at: at.place)
    for line, said in zip(lines, trace.load(lines), strict=True):
        try:
            require_text(said.body["messages"])
            json.dumps([line.session, said.body], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            what, remedy = "holds half a character (a lone surrogate)", "leave the request out"
            raise ConfigError(Problem(line.where, what, remedy)) from None
        except ValueError as error:
            remedy = "leave the request out: text alone can be sent again"
            raise ConfigError(Problem(line.where, str(error), remedy)) from None
        if line.session == "":
            raise ConfigError(Problem(line.where, "the session's name is empty", "give it one"))
        yield _Request(line, said, roles.of(line, said), _time(line, said))


def _in_order(requests: Iterable[_Request]) -> list[_Request]:
    """As they were made: by their times if all have one, as in the logs of several processes."""
    found = list(requests)
    if all(request.time is not None for request in found):
        found.sort(key=lambda request: request.time or 0.0)
    return found


class _Chains:
    """Tells the sessions of requests that name none, by what their messages begin with."""

    def __init__(self, named: Container[str | None]) -> None:
        self._named = named
        self._begun: dict[int, str] = {}
        """By the hash of all messages of a request: its session."""
        self._sent: set[tuple[str, str, str]] = set()
        """Session, role and messages of each request: who asks the same again begins anew."""
        self._numbers = count(1)
        self.count = 0
        """Sessions that were told apart here."""

    def session(self, named: str | None, role: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """The one it names; else that of the request with the most messages these begin with."""
        text = json.dumps(messages, sort_keys=True)
        whole, found = 0, None
        for message in without_head(messages):
            whole = hash((whole, json.dumps(message, sort_keys=True)))
            found = self._begun.get(whole, found)
        if named is not None:
            found = named
        elif found is None or (found, role, text) in self._sent:
            found = next(
                name for number in self._numbers if (name := f"unnamed-{number}") not in self._named
            )
            self.count += 1
        self._begun[whole] = found
        self._sent.add((found, role, text))
        return found


class _Roles:
    """Names of roles, as a cluster file takes them: `Qwen/Qwen3-8B` is `qwen-qwen3-8b`."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._said: dict[str, str] = {}

    def of(self, line: trace.Line, request: trace.Recorded) -> str:
        """Raises ConfigError for a request that names none, and for two that would be one."""
        said = request.field(self._key)
        where = f"{line.where}: {self._key}"
        if not isinstance(said, str) or not said:
            what = f"{said!r} names no role"
            raise ConfigError(Problem(where, what, "log the request's model, or give --role-key"))
        role = re.sub(r"[^a-z0-9._-]+", "-", said.lower()).lstrip("._-") or "role"
        if (known := self._said.setdefault(role, said)) != said:
            what = f"{known!r} and {said!r} would both be role {role!r}"
            raise ConfigError(Problem(where, what, "rename one of them in the log"))
        if role in TAKEN:
            what = f"{said!r} is the name of a part of each system"
            raise ConfigError(Problem(where, what, "rename it in the log, or give --role-key"))
        return role


def _call(request: _Request, answer: int, longest: int | None) -> RecordedCall:
    body = {name: value for name, value in request.said.body.items() if name != "model"}
    length = _answer_length(request.said, answer)
    return RecordedCall(role=request.role, request=body, answer=min(length, longest or length))


def _named(name: str) -> str:
    """A workload's name, of which files are named: `my log` is `my-log`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:100] or "recorded"


def _answer_length(said: trace.Recorded, default: int) -> int:
    response = said.field("response")
    for _ in range(2):
        if isinstance(response, str):
            try:
                response = json.loads(response)
            except ValueError:
                break
        if not isinstance(response, Mapping):
            break
        if isinstance(usage := response.get("usage"), Mapping):
            if isinstance(length := usage.get("completion_tokens"), int) and length > 0:
                return length
            break
        response = response.get("body")
    for name in ("max_completion_tokens", "max_tokens"):
        if isinstance(length := said.body.get(name), int) and length > 0:
            return length
    return default


def _began(firsts: Mapping[str, _Request]) -> dict[str, float] | None:
    """When each session began, in seconds since 1970; None if no line has a time."""
    known = {name: first.time for name, first in firsts.items() if first.time is not None}
    if not known:
        return None
    if missing := next((session for session in firsts if session not in known), None):
        what = "has no time, which other sessions have"
        remedy = f"log one of {', '.join(_TIMES)} in every line, or in none"
        raise ConfigError(Problem(firsts[missing].where, what, remedy))
    return known


def _rate(began: Mapping[str, float] | None) -> float | None:
    """Sessions per second, by the mean time between them."""
    if not began:
        return None
    took = max(began.values()) - min(began.values())
    return (len(began) - 1) / took if took > 0 else None


def _time(line: trace.Line, said: trace.Recorded) -> float | None:
    """Seconds since 1970 of a line. Raises ConfigError for a time that is none."""
    found = ((name, said.field(name)) for name in _TIMES)
    field, value = next(((name, at) for name, at in found if at is not None), ("", None))
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return datetime.fromisoformat(value).timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15:
            # Milliseconds, where seconds would be thousands of years from now.
            return value / 1000 if value > 1e11 else float(value)
    except ValueError:
        pass
    what, remedy = f"{value!r} is no time", "log seconds since 1970 or ISO 8601"
    raise ConfigError(Problem(f"{line.where}: {field}", what, remedy))
