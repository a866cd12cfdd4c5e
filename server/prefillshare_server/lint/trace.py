"""Recorded chat requests: JSON lines in any of the shapes that people have.

A trace is read twice, so that one session is in memory at a time: once for where its lines are,
once for what they say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from prefillshare_server.errors import ConfigError, Problem

_SHOWN_PROBLEMS = 10
_CHAT = "/chat/completions"
_HEADERS = ("x-session-id", "x-prefillshare-session")
_PARENT = "x-parent-session-id"
_INNER = ("body", "request", "json")
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "metadata.session_id")


@dataclass(frozen=True, slots=True)
class Line:
    """Where a chat request stands in a trace."""

    path: Path
    number: int
    offset: int
    session: str | None
    parent: str | None
    """The session that a new one goes on from, as where the SDK forks one."""
    place: int
    """Among all lines of the trace, in the order they were made."""

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"


class Recorded(NamedTuple):
    """A chat request, and the assistant message it got if the trace has it."""

    body: Mapping[str, Any]
    answer: Mapping[str, Any] | None
    around: Sequence[Mapping[str, Any]]
    """The objects that the body stands in, outermost first."""

    def field(self, name: str) -> Any:
        """What a dotted field says, of the body or else of what is around it; None without it."""
        places = [self.body, *reversed(self.around)]
        return next((value for place in places if (value := _at(place, name)) is not None), None)


class Index(NamedTuple):
    """The chat requests of a trace by session, in the order they were made."""

    sessions: dict[str | None, list[Line]]
    skipped: int
    """Lines that hold other requests."""

    def families(self) -> list[list[Line]]:
        """The lines of sessions that go on from one another, in the order they were made."""
        of: dict[str | None, list[Line]] = {}
        for session, lines in self.sessions.items():
            # As the server has it: what counts is the first call, and a parent that exists.
            of[session] = of.get(lines[0].parent, []) if lines[0].parent else []
            of[session] += lines
        families = {id(lines): lines for lines in of.values()}.values()
        return [sorted(lines, key=lambda line: line.place) for lines in families]


def index(
    paths: Sequence[Path],
    *,
    session_key: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Index:
    """Find the chat requests of a trace; `progress` is told the bytes of each line.

    `session_key` is a field, dotted, of the line or of the request. Raises ConfigError naming
    file, line and field of whatever is no request.
    """
    sessions: dict[str | None, list[Line]] = {}
    problems: list[Problem] = []
    skipped = place = 0
    for path in paths:
        offset = 0
        for number, raw in enumerate(_lines(path), 1):
            try:
                entry = _entry(raw)
                if entry is not None and _is_chat(entry) and not _is_other(entry):
                    body, beside = _body(entry)
                    session = _session(body, beside, session_key)
                    parent = _parent(beside) if session is not None else None
                    line = Line(path, number, offset, session, parent, place)
                    sessions.setdefault(session, []).append(line)
                elif entry is not None:
                    skipped += 1
            except _BadLine as bad:
                problems.append(Problem(f"{path}:{number}: {bad.field}", bad.what, bad.remedy))
            offset += len(raw)
            place += 1
            progress(len(raw))
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        shown = problems[:_SHOWN_PROBLEMS]
        if more > 0:
            shown.append(Problem("the trace", f"{more} more lines are bad", "mend the first ones"))
        raise ConfigError(*shown)
    return Index(sessions, skipped)


def load(lines: Sequence[Line]) -> Iterator[Recorded]:
    """What the lines of an index say, one after the other."""
    for line in lines:
        with line.path.open("rb") as file:
            file.seek(line.offset)
            entry = _entry(file.readline())
        body, around = _body(entry or {})
        yield Recorded(body, _answer(entry or {}), around)


class _BadLine(Exception):
    def __init__(self, field: str, what: str, remedy: str) -> None:
        super().__init__(what)
        self.field, self.what, self.remedy = field, what, remedy


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        problem = Problem(str(path), f"cannot be read ({error.strerror})", "check the path")
        raise ConfigError(problem) from None


def _entry(raw: bytes) -> Mapping[str, Any] | None:
    """The object of a line; None for an empty line."""
    if not raw.strip():
        return None
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError) as error:
        what = f"{raw.strip()[:40].decode(errors='replace')!r} is no JSON ({error})"
        raise _BadLine("the line", what, "write one JSON object a line") from None
    if not isinstance(entry, dict):
        raise _BadLine(
            "the line",
            f"is a JSON {type(entry).__name__}, not an object",
            "write one request a line",
        )
    return entry


def _is_chat(entry: Mapping[str, Any]) -> bool:
    """Whether the line may be a chat request: its path says so, or there is none."""
    request = entry.get("request")
    for fields in (entry, request if isinstance(request, Mapping) else {}):
        if str(fields.get("method") or "POST").upper() != "POST":
            return False
        for name in ("path", "url", "endpoint"):
            if isinstance(fields.get(name), str):
                return _CHAT in str(fields[name])
    return True


def _is_other(entry: Mapping[str, Any]) -> bool:
    """Whether the line is a request of another kind: an embedding, a response, a completion."""
    fields: Any = entry
    for _ in range(4):
        if not isinstance(fields, Mapping) or "messages" in fields:
            return False
        inner = next((key for key in _INNER if key in fields), None)
        if inner is None:
            return "input" in fields or "prompt" in fields
        fields = _parsed(fields[inner])
    return False


def _body(entry: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """The request body of a line, and the objects around it, outermost first."""
    around: list[Mapping[str, Any]] = []
    fields: Any = entry
    name = ""
    while True:
        if not isinstance(fields, Mapping):
            what = f"{_short(fields)} is no request"
            raise _BadLine(name or "the line", what, "send an object with messages")
        inner = next((key for key in _INNER if key in fields), None)
        if "messages" in fields or inner is None or len(around) > 3:
            break
        around.append(fields)
        name = f"{name}.{inner}" if name else inner
        fields = _parsed(fields[inner])
    if not isinstance(fields.get("messages"), list):
        field = f"{name}.messages" if name else "messages"
        what = f"{_short(fields.get('messages'))} is no list of messages"
        if "messages" not in fields:
            what = "missing: the line is no chat request"
        raise _BadLine(field, what, 'write {"messages": [...]}, or put such an object into "body"')
    return fields, around


def _parsed(value: Any) -> Any:
    """A body that was recorded as text."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _session(
    body: Mapping[str, Any], around: Sequence[Mapping[str, Any]], key: str | None
) -> str | None:
    places = [*around, body]
    if key is not None:
        found = next((v for p in places if (v := _at(p, key)) is not None), None)
        if found is None:
            known = sorted({name for place in places for name in place})
            raise _BadLine(key, "is not there", f"--session-key needs a field of {known}")
        return str(found)
    for place in around:
        if isinstance(place.get("session"), str):
            return str(place["session"])
    headers = _headers(around)
    named = [headers.get(name) for name in _HEADERS]
    named += [_at(place, field) for field in _SESSION_FIELDS for place in places]
    named.append(headers.get("x-session-affinity"))
    return next((value for value in named if isinstance(value, str) and value), None)


def _parent(around: Sequence[Mapping[str, Any]]) -> str | None:
    named = [place.get("parent") for place in around] + [_headers(around).get(_PARENT)]
    return next((value for value in named if isinstance(value, str) and value), None)


def _headers(around: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        str(name).lower(): value
        for place in around
        if isinstance(place.get("headers"), Mapping)
        for name, value in place["headers"].items()
    }


def _at(place: Mapping[str, Any], field: str) -> Any:
    value: Any = place
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _answer(entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The assistant message beside a request, wherever a completion is found."""
    response = _parsed(entry.get("response"))
    for _ in range(2):
        if isinstance(response, Mapping) and "choices" not in response:
            response = _parsed(response.get("body"))
    choices = response.get("choices") if isinstance(response, Mapping) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        return None
    message = choices[0].get("message")
    return message if isinstance(message, Mapping) else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
