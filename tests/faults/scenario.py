"""A random scenario: workers, sessions of calls, faults. A seed says it all."""

from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from tests.faults.bench import Shape
from tests.faults.client import Leave
from tests.mocks.mock_pair_faults import DECODE_FAULTS, PREFILL_FAULTS, Fault

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("weather", "numbers")
]
QUESTIONS = (
    "a question about the weather in Paris",
    "another question, é 😀 and 1 2 3",
    "is the answer 42 yes or no and then some words about numbers",
)


@dataclass(frozen=True, slots=True)
class CallPlan:
    """One call of a session."""

    number: int
    role: str
    kind: Literal["chat", "completions"]
    body: dict[str, Any]
    """Without messages or prompt."""
    question: str
    prompts: int = 1
    leave: Leave | None = None
    pause_s: float = 0.0
    """Before it."""


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """Calls that follow each other; each goes on from the last one that was answered."""

    id: str | None
    calls: list[CallPlan]


@dataclass(frozen=True, slots=True)
class Strike:
    """Something that happens to a worker at a time, whatever it is doing."""

    at_s: float
    what: Literal["kill", "drain", "expire"]
    worker: str
    for_s: float | None
    """None is for the rest of the scenario."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that is decided before a scenario begins."""

    seed: int
    shape: Shape
    sessions: list[SessionPlan]
    faults: dict[str, list[Fault]]
    strikes: list[Strike]
    deaf: dict[str, int] = field(default_factory=dict)
    """How many releases each prefill worker misses."""
    pace_s: float = 0.002
    merging: float = 0.1

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.shape}"]
        for session in self.sessions:
            lines += [f"  session {session.id}:", *(f"    {call}" for call in session.calls)]
        lines += [f"  {worker}: {faults}" for worker, faults in self.faults.items() if faults]
        lines += [f"  {strike}" for strike in self.strikes]
        return "\n".join([*lines, f"  missed releases: {self.deaf}"])


def scenario(seed: int) -> Scenario:
    """The scenario of this seed, always the same."""
    chance = Random(seed)
    tight = chance.random() < 0.2
    many = (1,) if tight else (1, 1, 2, 2, 3)
    replicas = {role: chance.choice(many) for role in ("alpha", "beta")}
    decode = [f"{role}-{n}" for role, count in replicas.items() for n in range(count)]
    shape = Shape(
        prefill=chance.choice((1, 2, 2)),
        decode=tuple(decode),
        decode_blocks=chance.randrange(18, 24) if tight else 400,
        prefill_blocks=chance.randrange(45, 70) if tight else 600,
        affinity="hard" if chance.random() < 0.1 else "soft",
        reserve_tokens=2 if tight else 64,
        tight=tight,
    )
    prefill = [f"prefill-{n}" for n in range(shape.prefill)]
    faults: dict[str, list[Fault]] = {worker: [] for worker in (*prefill, *decode)}
    for _ in range(chance.choice((0, 1, 2, 2, 3, 4, 5, 6))):
        worker = chance.choice([*prefill, *decode])
        faults[worker].append(_fault(chance, worker in prefill))
    return Scenario(
        seed,
        shape,
        sessions=_sessions(chance, tight),
        faults=faults,
        strikes=_strikes(chance, prefill, decode),
        deaf={worker: chance.choice((1, 9)) for worker in prefill if chance.random() < 0.05},
        pace_s=0.02 if tight else chance.choice((0.0, 0.002, 0.01)),
        merging=chance.choice((0.0, 0.1, 0.5)),
    )


def _fault(chance: Random, prefill: bool) -> Fault:
    down_s = None if chance.random() < 0.1 else chance.choice((0.02, 0.3, 1.5))
    if prefill:
        return Fault(chance.choice(PREFILL_FAULTS), chance.choice((0, 0, 1, 1, 2, 4)), 0, down_s)
    after = chance.choice((-1, 0, 1, 2, 3, 4, 6, 8, 12, 20))
    return Fault(chance.choice(DECODE_FAULTS), chance.choice((0, 0, 0, 1, 1, 2)), after, down_s)


def _strikes(chance: Random, prefill: list[str], decode: list[str]) -> list[Strike]:
    strikes = []
    for _ in range(chance.choice((0, 0, 0, 1, 1, 2))):
        what: Literal["kill", "drain", "expire"] = chance.choice(("kill", "drain", "expire"))
        for_s = None if chance.random() < 0.1 else chance.choice((0.03, 0.5, 2.0))
        worker = chance.choice([*prefill, *decode])
        strikes.append(Strike(chance.uniform(0, 0.25), what, worker, for_s))
    return strikes


def _sessions(chance: Random, tight: bool) -> list[SessionPlan]:
    count, sessions, number = chance.randrange(6 if tight else 3, 9), [], 0
    groups = [0] * (count if tight else chance.randrange(1, 4))
    for _ in range(count):
        groups[chance.randrange(len(groups))] += 1
    for index, calls in enumerate(groups):
        session_id = None if chance.random() < 0.1 else f"s{index}"
        plans = []
        for _ in range(calls):
            number += 1
            # Only a session remembers how a tool call was written; tools make prompts long.
            tools = not tight and session_id is not None
            plans.append(_call(chance, number, tight=tight, tools=tools))
        sessions.append(SessionPlan(session_id, plans))
    return sessions


def _call(chance: Random, number: int, *, tight: bool, tools: bool) -> CallPlan:
    kind: Literal["chat", "completions"] = "completions" if chance.random() < 0.12 else "chat"
    role, stream = chance.choice(("alpha", "beta")), chance.random() < 0.7
    body: dict[str, Any] = {"model": role, "stream": stream}
    if stream and chance.random() < 0.7:
        body["stream_options"] = {"include_usage": True}
    if chance.random() < 0.6:
        body["return_token_ids"] = True
    if chance.random() < (0.2 if tight else 0.5):
        body["max_tokens"] = chance.randrange(1, 40)
    if chance.random() < (0.5 if tight else 0.2):
        body["n"] = 2
    if chance.random() < 0.2:
        body |= {"temperature": 1.0, "seed": chance.randrange(100)}
    if chance.random() < 0.15:
        body["logprobs"] = True if kind == "chat" else 1
    if kind == "chat":
        form = chance.random()
        if form < 0.35 and tools:
            body["tools"] = TOOLS
        elif form < 0.45:
            body["response_format"] = {"type": "json_object"}
        elif form < 0.55:
            body["chat_template_kwargs"] = {"enable_thinking": True}
    leave = None
    if chance.random() < 0.15:
        leave = Leave(after_s=chance.uniform(0, 0.06))
        if stream and chance.random() < 0.6:
            leave = Leave(after_chunks=chance.randrange(1, 12))
    return CallPlan(
        number,
        role,
        kind,
        body,
        chance.choice(QUESTIONS),
        prompts=2 if kind == "completions" and chance.random() < 0.3 else 1,
        leave=leave,
        pause_s=0.0 if tight else chance.choice((0.0, 0.0, 0.01, 0.05)),
    )
