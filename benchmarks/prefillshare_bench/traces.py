"""Session traces: who is called when, over how many tokens; the same for every system and rate.

A workload file is JSON lines. The first line is the workload, each further one a session:

    {"type": "workload", "version": 1, "name": "react", "seed": 0, "roles": ["agent1", "agent2"],
     "head": 16, "about": "what it is, in words"}
    {"type": "session", "id": "s0", "arrival": 0.731, "calls": [
      {"role": "agent1", "history": "main", "new": 512, "tail": 32, "answer": 24}, …]}

`arrival` counts mean inter-arrival times, so that a run divides it by its rate of sessions per
second. Inside a session each call begins when the one before it has ended.

A call adds `new` tokens to the history that it names. Its prompt is the workload's `head` tokens,
the history, and `tail` tokens of its role, which are not kept. `answer` tokens are generated and
join the history, unless `"keep_answer": false`. All tokens but the generated ones are drawn, always
the same ones for the same seed.

A recorded call has the chat request as it was logged instead:

    {"role": "planner", "request": {"messages": […]}, "answer": 128}
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from prefillshare_server.config_values import RoleName
from prefillshare_server.errors import ConfigError, Problem

VERSION = 1
TAKEN = frozenset({"base", "prefill", "lora"})
"""Names that no role can have."""
_IDS = range(20, 250)
"""Ordinary tokens of any vocabulary: what a prompt costs does not depend on what it says."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def tokens(count: int, *seed: object) -> list[int]:
    """Drawn token ids, always the same for the same seed."""
    return random.Random(repr(seed)).choices(_IDS, k=count)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Call(_Strict):
    """A call whose prompt is made of drawn tokens and earlier answers. All lengths in tokens."""

    role: str
    history: str = "main"
    new: int = Field(ge=0)
    """Join the history before the call."""
    tail: int = Field(ge=0)
    """Of the role; end the prompt and are not kept."""
    answer: int = Field(ge=1)
    keep_answer: bool = True
    """Whether the answer joins the history."""


class RecordedCall(_Strict):
    """A chat request as it was logged."""

    role: str
    request: dict[str, Any]
    answer: int = Field(ge=1)
    """Tokens to generate, whatever the model has to say."""


def _kind(call: Any) -> str:
    recorded = "request" in call if isinstance(call, Mapping) else isinstance(call, RecordedCall)
    return "recorded" if recorded else "drawn"


AnyCall = Annotated[
    Annotated[Call, Tag("drawn")] | Annotated[RecordedCall, Tag("recorded")], Discriminator(_kind)
]


class Session(_Strict):
    """Calls that follow one another without a pause."""

    id: str = Field(min_length=1)
    arrival: float = Field(ge=0, allow_inf_nan=False)
    """In mean inter-arrival times since the workload began."""
    calls: tuple[AnyCall, ...] = Field(min_length=1)

    def prompt_tokens(self, head: int) -> list[int] | None:
        """Length of each prompt, with `head` tokens in front; None if calls are recorded."""
        histories: dict[str, int] = {}
        lengths = []
        for call in self.calls:
            if not isinstance(call, Call):
                return None
            context = histories.get(call.history, 0) + call.new
            lengths.append(head + context + call.tail)
            histories[call.history] = context + (call.answer if call.keep_answer else 0)
        return lengths

    def prefill_tokens(
        self, head: int, *, per_role: bool = False, block_size: int = 1
    ) -> list[int] | None:
        """Tokens that each call computes if nothing that was computed is evicted.

        Each history's prefix is computed once, with `per_role` once by every role that reads it.
        Only whole blocks of `block_size` tokens are found again. None if calls are recorded.
        """
        lengths = self.prompt_tokens(head)
        if lengths is None:
            return None
        tokens = []
        computed: dict[tuple[str, str], int] = {}
        began: set[str] = set()
        for call, prompt in zip(self.calls, lengths, strict=True):
            assert isinstance(call, Call)
            reader = call.role if per_role else ""
            known = computed.get((reader, call.history), head if reader in began else 0)
            # An engine computes at least the last token of every prompt.
            tokens.append(prompt - min(known, prompt - 1) // block_size * block_size)
            computed[reader, call.history] = prompt - call.tail
            began.add(reader)
        return tokens


class Workload(_Strict):
    """Sessions in the order of their arrival."""

    name: str
    """Files are named after it."""
    seed: int = 0
    roles: tuple[RoleName, ...] = Field(min_length=1)
    head: int = Field(ge=0, default=0)
    """Tokens in front of every prompt of every session."""
    about: str = ""
    sessions: tuple[Session, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name {self.name!r} is to be letters, digits, '.', '_' or '-', 100 at most; "
                "results are kept in files of that name"
            )
        if twice := sorted({role for role in self.roles if self.roles.count(role) > 1}):
            raise ValueError(f"roles has {twice[0]!r} twice; name each role once")
        if taken := sorted(TAKEN & set(self.roles)):
            raise ValueError(f"role {taken[0]!r} is the name of a part of each system; rename it")
        if len({isinstance(call, Call) for s in self.sessions for call in s.calls}) > 1:
            raise ValueError("some calls are drawn and some recorded; write a file for each kind")
        ids: set[str] = set()
        before = 0.0
        for session in self.sessions:
            where = f"session {session.id!r}"
            if session.id in ids:
                raise ValueError(f"{where} is there twice; give each session an id of its own")
            ids.add(session.id)
            if session.arrival < before:
                raise ValueError(
                    f"{where} arrives at {session.arrival}, before the session in front of it "
                    f"({before}); sort the sessions by arrival"
                )
            before = session.arrival
            for index, call in enumerate(session.calls):
                if call.role not in self.roles:
                    raise ValueError(
                        f"{where}, call {index}: role {call.role!r} is none of the workload's "
                        f"roles {list(self.roles)}; add it there"
                    )
                if isinstance(call, RecordedCall) and not isinstance(
                    call.request.get("messages"), list
                ):
                    raise ValueError(
                        f"{where}, call {index}: request has no list of messages; "
                        "log whole chat requests"
                    )
            if 0 in (lengths := session.prompt_tokens(self.head) or []):
                raise ValueError(
                    f"{where}, call {lengths.index(0)}: the prompt has no tokens; "
                    "give it new ones, a tail or the workload a head"
                )
        return self

    @property
    def calls(self) -> int:
        """How many there are."""
        return sum(len(session.calls) for session in self.sessions)

    def longest(self) -> int | None:
        """Most tokens that a prompt and its answer have; None if calls are recorded."""
        most = 0
        for session in self.sessions:
            lengths = session.prompt_tokens(self.head)
            if lengths is None:
                return None
            whole = (n + call.answer for call, n in zip(session.calls, lengths, strict=True))
            most = max(most, *whole)
        return most

    def needed(
        self, made: Mapping[str, int], *, per_role: bool = False, block_size: int = 1
    ) -> dict[str, int] | None:
        """Tokens to compute for the first calls of sessions, so many as `made` says of each.

        By role with `per_role`, else all under "". Each history's prefix is computed once, and once
        in all the head that sessions have in common. None if calls are recorded.
        """
        head = self.head // block_size * block_size
        needed: dict[str, int] = {}
        for session in self.sessions:
            tokens = session.prefill_tokens(self.head, per_role=per_role, block_size=block_size)
            if tokens is None:
                return None
            in_session: dict[str, int] = {}
            ran = list(zip(session.calls, tokens, strict=True))[: made.get(session.id, 0)]
            for call, count in ran:
                reader = call.role if per_role else ""
                in_session[reader] = in_session.get(reader, 0) + count
            for reader, count in in_session.items():
                needed[reader] = needed[reader] + count - head if reader in needed else count
        return needed


class Context:
    """The prompts of a session, which grow by what was answered."""

    def __init__(self, workload: Workload, session: Session) -> None:
        self._workload = workload
        self._session = session
        self._head = tokens(workload.head, workload.seed, "head")
        self._histories: dict[str, list[int]] = {}

    def prompt(self, index: int) -> list[int]:
        """Token ids of the next call, which has this index."""
        call = self._call(index)
        seed = self._workload.seed
        history = self._histories.setdefault(call.history, [])
        history += tokens(call.new, seed, "new", self._session.id, index)
        return [*self._head, *history, *tokens(call.tail, seed, "tail", call.role)]

    def answered(self, index: int, ids: Sequence[int]) -> None:
        """Take in what that call generated."""
        call = self._call(index)
        if call.keep_answer:
            self._histories[call.history] += ids

    def _call(self, index: int) -> Call:
        call = self._session.calls[index]
        if not isinstance(call, Call):
            raise TypeError(f"call {index} of session {self._session.id!r} was recorded as text")
        return call


class _Header(_Strict):
    type: Literal["workload"]
    version: Literal[1]
    name: str
    seed: int
    roles: tuple[str, ...]
    head: int
    about: str = ""


class _Line(Session):
    type: Literal["session"]


_Model = TypeVar("_Model", bound=_Strict)


def write(workload: Workload, path: Path) -> None:
    """Write a workload file: whole or not at all."""
    header = {"type": "workload", "version": VERSION, **workload.model_dump(exclude={"sessions"})}
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        for line in (header, *({"type": "session", **_written(s)} for s in workload.sessions)):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(partial, path)


def read(path: Path) -> Workload:
    """Read a workload file. Raises ConfigError that names the line and the field."""
    try:
        # Not splitlines: JSON strings may hold what Unicode takes for the end of a line.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        problem = Problem(str(path), f"cannot be read ({error})", "check the path")
        raise ConfigError(problem) from None
    numbered = [(f"{path}:{n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(Problem(str(path), "is empty", "write a workload into it"))
    header = _parsed(_Header, *numbered[0])
    sessions = [_parsed(_Line, *line) for line in numbered[1:]]
    try:
        return Workload(
            **header.model_dump(exclude={"type", "version"}),
            sessions=tuple(Session(id=s.id, arrival=s.arrival, calls=s.calls) for s in sessions),
        )
    except ValidationError as error:
        raise ConfigError(*_problems(str(path), error)) from None


def _parsed(model: type[_Model], where: str, line: str) -> _Model:
    try:
        return model.model_validate_json(line)
    except ValidationError as error:
        raise ConfigError(*_problems(where, error)) from None


def _problems(where: str, error: ValidationError) -> list[Problem]:
    problems = []
    for found in error.errors(include_url=False):
        field = ".".join(str(part) for part in found["loc"] if part not in ("drawn", "recorded"))
        what = found["msg"].removeprefix("Value error, ")
        if isinstance(found["input"], str | int | float | bool):
            what = f"{found['input']!r}: {what}"
        remedy = "see prefillshare_bench/traces.py for the format"
        problems.append(Problem(f"{where}: {field}" if field else where, what, remedy))
    return problems


def _written(session: Session) -> dict[str, Any]:
    calls = []
    for call in session.calls:
        fields = call.model_dump()
        if fields.get("keep_answer") is True:
            del fields["keep_answer"]
        calls.append(fields)
    return {"id": session.id, "arrival": session.arrival, "calls": calls}
