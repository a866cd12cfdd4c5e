"""The paper's workloads (§4.1, A.2, B.2, C.5) as session traces.

`scale` multiplies all lengths but the head, one KV block that all prompts begin with; 1.0 is the
paper's size. Lengths are fixed per invocation, as the paper has it, and the same in every session.

Where the lengths are from. The paper refers to Kim et al. 2025 (arXiv 2506.04301) and ICaRus (arXiv
2603.13281) and prints none; neither has a table of them per invocation that we could find. The
tables below are ours, within what is known:

- Kim et al., as others sum it up: an input of about a thousand tokens grows to three or four times
  that. The few-shot prompts of their ReAct agents for HotpotQA and WebShop, in their repository
  VIA-Research/AgentBench, have 7 and 9.5 KB: about 2,000 tokens.
- The paper's Table 6: 0.68M tokens computed at 94.4% hits are 12M prompt tokens, 11.7k a call.
- TraceLab (arXiv 2606.30560, which A.2 follows), in the median: a step adds 857 tokens (Claude) or
  886 (Codex) and writes 252 or 184. The prompts of the paper's workload have 8,145 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefillshare_bench.traces import Call, Session, Workload

HEAD = 32
"""One KV block here; in the paper one of 16, of the 30 tokens that low-overlap prompts share."""


@dataclass(frozen=True)
class Turn:
    """Lengths of one agent's call, in tokens."""

    new: int
    """What came in since the call before: a tool's result, a message."""
    tail: int
    """The agent's own instructions."""
    answer: int


REACT_START = 2048
"""Few-shot examples, tools, the question."""
REACT = (Turn(480, 64, 96), Turn(640, 64, 64), Turn(320, 64, 80), Turn(480, 64, 112))
"""Thought and action are short, what the tool says is long."""

REFLEXION_START = 3072
"""The same and a trajectory that failed."""
REFLEXION = (Turn(128, 96, 320), Turn(64, 96, 160), Turn(96, 96, 288), Turn(192, 96, 224))
"""Trial, evaluation, reflection, plan: the agents write most of the context themselves."""

LONG_START = 1024
LONG = (Turn(64, 64, 512),) * 4
"""Decode is most of the work."""

SUPERVISED_PROMPT = 8145
"""Mean over all prompts (A.2)."""
SUPERVISED = Turn(870, 14, 200)
"""A step of TraceLab: what a specialist reports, and what is written."""

SEQUENTIAL = Turn(0, 16, 128)
"""Each agent reads what the ones before it wrote, and nothing else."""


def react(
    *, sessions: int, seed: int = 0, scale: float = 1.0, roles: int = 4, rounds: int = 4
) -> Workload:
    """ReAct: agents in turn over one context; tools say much, agents little."""
    about = "ReAct: agents in turn over one context, long observations, short answers"
    order = _round_robin(roles, rounds)
    calls = _shared(order, REACT_START, REACT, scale)
    return _workload("react", about, _agents(roles), [calls] * sessions, seed, scale)


def reflexion(
    *, sessions: int, seed: int = 0, scale: float = 1.0, roles: int = 4, rounds: int = 4
) -> Workload:
    """Reflexion: agents in turn over one context; they write long trials and reflections."""
    about = "Reflexion: agents in turn over one context, long answers, short observations"
    order = _round_robin(roles, rounds)
    calls = _shared(order, REFLEXION_START, REFLEXION, scale)
    return _workload("reflexion", about, _agents(roles), [calls] * sessions, seed, scale)


def long_output(
    *, sessions: int, seed: int = 0, scale: float = 1.0, roles: int = 4, rounds: int = 4
) -> Workload:
    """Agents in turn that write more than they read; the paper has no such workload."""
    about = "agents in turn over one context, answers eight times as long as what comes in"
    calls = _shared(_round_robin(roles, rounds), LONG_START, LONG, scale)
    return _workload("long_output", about, _agents(roles), [calls] * sessions, seed, scale)


def swarm(
    *, sessions: int, seed: int = 0, scale: float = 1.0, roles: int = 4, rounds: int = 4
) -> Workload:
    """Swarm (B.2): each agent hands over to another one, drawn at random; ReAct's lengths."""
    about = "swarm: each agent hands over to another one drawn at random, one context"
    chance = random.Random(repr(("swarm", seed)))

    def order() -> list[int]:
        agents = [chance.randrange(roles)]
        while len(agents) < roles * rounds:
            others = [agent for agent in range(roles) if agent != agents[-1]]
            agents.append(chance.choice(others or agents[-1:]))
        return agents

    each = [_shared(order(), REACT_START, REACT, scale) for _ in range(sessions)]
    return _workload("swarm", about, _agents(roles), each, seed, scale)


def supervisor(
    *, sessions: int, seed: int = 0, scale: float = 1.0, roles: int = 4, rounds: int = 1
) -> Workload:
    """Supervisor (A.2): main, A, main, B, main, C, main; `rounds` times.

    Every role has a history of its own; only the head is common, 0.4% of a prompt at scale 1.
    Raises ValueError if there is no specialist.
    """
    if roles < 2:
        raise ValueError(f"roles is {roles}; a supervisor needs itself and one specialist or more")
    about = "supervisor: a main agent calls specialists, each over a history of its own"
    names = ("main", *(f"sub{number}" for number in range(1, roles)))
    step = SUPERVISED
    order = [name for sub in names[1:] for name in ("main", sub)] * rounds + ["main"]
    # The first prompt of a history is so long that the mean over the session is the paper's.
    grown = [order[:at].count(name) for at, name in enumerate(order)]
    start = SUPERVISED_PROMPT - HEAD - step.tail
    start -= round(sum(grown) / len(order) * (step.new + step.answer))
    calls = [
        Call(
            role=name,
            history=name,
            new=_scaled(step.new if before else max(start, step.new), scale),
            tail=_scaled(step.tail, scale),
            answer=_scaled(step.answer, scale),
        )
        for name, before in zip(order, grown, strict=True)
    ]
    return _workload("supervisor", about, names, [calls] * sessions, seed, scale)


def input_length(
    tokens: int,
    *,
    sessions: int,
    seed: int = 0,
    scale: float = 1.0,
    roles: int = 4,
    rounds: int = 1,
) -> Workload:
    """Sequential agents over a first prompt of `tokens` tokens (C.5: 64 and 4,096).

    `scale` multiplies it too. Raises ValueError if it has no room for the head and a role's tail.
    """
    least = HEAD + SEQUENTIAL.tail + 1
    if tokens < least:
        raise ValueError(f"tokens is {tokens}; a prompt has {least} or more")
    about = f"agents one after the other over a first prompt of {tokens} tokens"
    start = tokens - HEAD - SEQUENTIAL.tail
    calls = _shared(_round_robin(roles, rounds), start, [SEQUENTIAL], scale)
    name = f"input_length_{tokens}"
    return _workload(name, about, _agents(roles), [calls] * sessions, seed, scale)


def roles_scaling(
    roles: int, *, sessions: int, seed: int = 0, scale: float = 1.0, context: int = 4096
) -> Workload:
    """Every one of `roles` roles answers once over the same context of `context` tokens."""
    about = f"{roles} roles answer once each over the same context"
    calls = [
        Call(
            role=name,
            new=0 if number else _scaled(context, scale),
            tail=_scaled(8, scale),
            answer=_scaled(32, scale),
            keep_answer=False,
        )
        for number, name in enumerate(_agents(roles))
    ]
    return _workload(f"roles_{roles}", about, _agents(roles), [calls] * sessions, seed, scale)


def arrivals(count: int, seed: int) -> list[float]:
    """A Poisson process of rate 1."""
    chance = random.Random(repr(("arrivals", seed)))
    times, now = [], 0.0
    for _ in range(count):
        now += chance.expovariate(1.0)
        times.append(round(now, 6))
    return times


def _agents(count: int) -> tuple[str, ...]:
    return tuple(f"agent{number}" for number in range(1, count + 1))


def _round_robin(roles: int, rounds: int) -> list[int]:
    return list(range(roles)) * rounds


def _shared(order: Iterable[int], start: int, turns: Sequence[Turn], scale: float) -> list[Call]:
    """Calls over one context, by agents that are numbered from 0."""
    calls = []
    for index, agent in enumerate(order):
        turn = turns[agent % len(turns)]
        calls.append(
            Call(
                role=_agents(agent + 1)[-1],
                new=_scaled(turn.new if index else start, scale),
                tail=_scaled(turn.tail, scale),
                answer=_scaled(turn.answer, scale),
            )
        )
    return calls


def _scaled(length: int, scale: float) -> int:
    """At least one token of what has any."""
    return max(1, round(length * scale)) if length else 0


def _workload(
    name: str,
    about: str,
    roles: Sequence[str],
    each: Sequence[Sequence[Call]],
    seed: int,
    scale: float,
) -> Workload:
    times = arrivals(len(each), seed)
    return Workload(
        name=name,
        seed=seed,
        roles=tuple(roles),
        head=HEAD,
        about=about if scale == 1 else f"{about}; all lengths times {scale:g}",
        sessions=tuple(
            Session(id=f"s{number}", arrival=arrival, calls=tuple(calls))
            for number, (arrival, calls) in enumerate(zip(times, each, strict=True))
        ),
    )
