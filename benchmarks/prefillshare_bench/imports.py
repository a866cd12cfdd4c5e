"""Recorded chat requests as a workload: what an agent program really sent.

Reads what `prefillshare lint` reads: the file that `PREFILLSHARE_TRACE` names, and plain logs of
OpenAI requests, one JSON object a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from prefillshare_bench.traces import RecordedCall, Session, Workload
from prefillshare_bench.workloads import arrivals
from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.lint import trace

ANSWER = 128
"""Tokens of an answer where the log does not say."""
_TIMES = ("time", "timestamp", "ts", "created_at", "created")


def recorded(
    paths: Sequence[Path],
    *,
    name: str = "recorded",
    session_key: str | None = None,
    answer: int = ANSWER,
    longest_answer: int | None = None,
    seed: int = 0,
) -> Workload:
    """The sessions of a trace, in the order of their first requests.

    `session_key` is the field, dotted, that names a request's session where none of the usual ones
    does. A request's `model` is its role, spelt as a
    cluster file has it. Answers are as long as the logged usage says, else as
    `max_tokens` or `max_completion_tokens`, else `answer` tokens, and never more than
    `longest_answer`. Sessions arrive as logged, on the scale where one comes per unit of time; if
    no line has a time, as a Poisson process drawn with `seed`. Raises ConfigError naming the line
    and the field of whatever cannot be used.
    """
    index = trace.index(paths, session_key=session_key)
    if not index.sessions:
        where = ", ".join(map(str, paths)) or "the trace"
        raise ConfigError(Problem(where, "has no chat requests", "log POST /v1/chat/completions"))
    if unnamed := index.sessions.get(None):
        raise ConfigError(
            Problem(
                unnamed[0].where,
                f"the request belongs to no session, as {len(unnamed) - 1} others do",
                "name the field that tells sessions apart with session_key",
            )
        )
    sessions = {str(session): lines for session, lines in index.sessions.items()}
    began = _began({session: lines[0] for session, lines in sessions.items()})
    if began is None:
        began = dict(zip(sessions, arrivals(len(sessions), seed), strict=True))
    order = sorted(sessions, key=lambda session: began[session])
    calls = {session: tuple(_calls(sessions[session], answer, longest_answer)) for session in order}
    roles = dict.fromkeys(call.role for session in order for call in calls[session])
    return Workload(
        name=name,
        seed=seed,
        roles=tuple(roles),
        about=f"recorded: {sum(map(len, calls.values()))} chat requests of {len(order)} sessions",
        sessions=tuple(Session(id=s, arrival=began[s], calls=calls[s]) for s in order),
    )


def _calls(lines: Sequence[trace.Line], answer: int, longest: int | None) -> Iterator[RecordedCall]:
    for line, request in zip(lines, trace.load(lines), strict=True):
        body = dict(request.body)
        role = body.pop("model", None)
        if not isinstance(role, str) or not role:
            what = f"{role!r} names no role"
            raise ConfigError(Problem(f"{line.where}: model", what, "log the request's model"))
        length = _answer_length(_entry(line), body, answer)
        if longest is not None:
            length = min(length, longest)
        yield RecordedCall(role=_role_name(role), request=body, answer=max(length, 1))


def _role_name(model: str) -> str:
    """A logged model's name as a cluster file takes it: `Qwen/Qwen3-8B` is `qwen-qwen3-8b`."""
    name = re.sub(r"[^a-z0-9._-]+", "-", model.lower()).lstrip("._-")
    return name or "role"


def _answer_length(entry: Mapping[str, Any], body: Mapping[str, Any], default: int) -> int:
    response = entry.get("response")
    for _ in range(2):
        if isinstance(response, str):
            try:
                response = json.loads(response)
            except ValueError:
                break
        if not isinstance(response, Mapping):
            break
        if isinstance(usage := response.get("usage"), Mapping):
            if isinstance(count := usage.get("completion_tokens"), int) and count > 0:
                return count
            break
        response = response.get("body")
    for name in ("max_completion_tokens", "max_tokens"):
        if isinstance(count := body.get(name), int) and count > 0:
            return count
    return default


def _began(firsts: Mapping[str, trace.Line]) -> dict[str, float] | None:
    """When each session arrived, in mean inter-arrival times; None if no line has a time."""
    times = {session: _time(line) for session, line in firsts.items()}
    known = {session: time for session, time in times.items() if time is not None}
    if not known:
        return None
    if missing := next((session for session in times if session not in known), None):
        what = "has no time, which other sessions have"
        remedy = f"log one of {', '.join(_TIMES)} in every line, or in none"
        raise ConfigError(Problem(firsts[missing].where, what, remedy))
    first, last = min(known.values()), max(known.values())
    gap = (last - first) / max(len(known) - 1, 1) or 1.0
    return {session: round((time - first) / gap, 6) for session, time in known.items()}


def _time(line: trace.Line) -> float | None:
    """Seconds since 1970 of a line. Raises ConfigError for a time that is none."""
    entry = _entry(line)
    field = next((name for name in _TIMES if entry.get(name) is not None), None)
    if field is None:
        return None
    value = entry[field]
    try:
        if isinstance(value, str):
            return datetime.fromisoformat(value).timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool):
            # Milliseconds, where seconds would be ten thousand years from now.
            return value / 1000 if value > 1e11 else float(value)
    except ValueError:
        pass
    what, remedy = f"{value!r} is no time", "log seconds since 1970 or ISO 8601"
    raise ConfigError(Problem(f"{line.where}: {field}", what, remedy))


def _entry(line: trace.Line) -> Mapping[str, Any]:
    with line.path.open("rb") as file:
        file.seek(line.offset)
        entry: Mapping[str, Any] = json.loads(file.readline())
    return entry
