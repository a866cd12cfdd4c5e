"""Randomised sessions: what several agents say to each other, as calls to the router."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.engine_faults.calls import Answer, Kind
from tests.engine_faults.exactness import Grammar

VERDICT: Grammar = {
    "type": "object",
    "properties": {
        "verdict": {"type": "string", "enum": ["right", "wrong", "unclear"]},
        "why": {"type": "string", "minLength": 3, "maxLength": 12},
    },
    "required": ["verdict", "why"],
    "additionalProperties": False,
}
PAINT: Grammar = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
_WORDS = ("harbour", "boat", "tide", "rope", "sail", "night", "wind", "map", "stone", "light")

Send = Callable[[Kind, Mapping[str, Any]], Awaitable[Answer]]


@dataclass(frozen=True)
class Step:
    """One call of a session."""

    role: str
    added: str
    """What the user says before it."""
    stream: bool
    max_tokens: int
    guide: str | None
    """"schema", "tool" (a forced call), "tools" (offered, not to be used) or None."""


@dataclass(frozen=True)
class History:
    """A session from its first call to its last."""

    kind: Kind
    steps: tuple[Step, ...]

    @classmethod
    def draw(cls, seed: int, roles: Sequence[str], *, most_tokens: int = 32) -> "History":
        """The same for the same arguments. Answers have up to `most_tokens`."""
        chance = random.Random(seed)
        kind: Kind = "completions" if chance.random() < 0.3 else "chat"
        # A few openings return, so that sessions share more than their head.
        opening = _text(random.Random(chance.randrange(12)), 40)
        steps = [
            Step(
                role=chance.choice(roles),
                added=f"{opening} " * (turn == 0) + _text(chance, 12),
                stream=chance.random() < 0.6,
                max_tokens=chance.randint(2, most_tokens),
                guide=_guide(chance) if kind == "chat" else None,
            )
            for turn in range(chance.randint(2, 4))
        ]
        return cls(kind, tuple(steps))

    async def run(self, send: Send) -> "AsyncIterator[Call]":
        """Make the calls one after another; raises what `send` raises."""
        messages: list[dict[str, Any]] = []
        ids: list[int] = []
        for step in self.steps:
            if self.kind == "chat":
                messages.append({"role": "user", "content": step.added})
                body = _chat(step, messages)
            else:
                ids += [ord(char) for char in step.added]
                body = {"prompt": [*ids]}
            body |= {"model": step.role, "stream": step.stream}
            body.setdefault("max_tokens", step.max_tokens)
            answer = await send(self.kind, body)
            yield Call(step, self.kind, body, answer)
            ids += answer.token_ids
            messages.append(answer.message)
            if answer.tool_calls:
                called = answer.tool_calls[0]["id"]
                messages.append({"role": "tool", "tool_call_id": called, "content": "Done."})


@dataclass(frozen=True)
class Call:
    """A call that was answered."""

    step: Step
    kind: Kind
    body: Mapping[str, Any]
    answer: Answer

    @property
    def grammar(self) -> Grammar | None:
        """What the answer was held to."""
        return {"schema": VERDICT, "tool": forced_call("paint", PAINT)}.get(self.step.guide or "")


def forced_call(name: str, parameters: Grammar) -> Grammar:
    """The grammar vLLM's hermes parser asks for when a strict tool must be called."""
    content = {"type": "json_schema", "json_schema": parameters}
    tags = [
        {
            "type": "tag",
            "begin": f'<tool_call>{before}{{"name": "{name}", "arguments": ',
            "content": content,
            "end": f"}}{before}</tool_call>",
        }
        for before in ("\n", "")
    ]
    return {
        "type": "structural_tag",
        "format": {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": "",
            "at_least_one": True,
            "stop_after_first": True,
        },
    }


def _guide(chance: random.Random) -> str | None:
    return chance.choice(["schema", "tool", "tools", None, None, None])


def _chat(step: Step, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    instructions = {"role": "system", "content": f"You are the {step.role}."}
    body: dict[str, Any] = {"messages": [instructions, *messages]}
    if step.guide == "schema":
        schema = {"name": "verdict", "schema": VERDICT, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif step.guide is not None:
        function = {"name": "paint", "strict": True, "parameters": PAINT}
        body["tools"] = [{"type": "function", "function": function}]
        named = {"type": "function", "function": {"name": "paint"}}
        body["tool_choice"] = named if step.guide == "tool" else "none"
    if step.guide in ("schema", "tool"):
        # An answer that is cut off would be no JSON to put into the context.
        body["max_tokens"] = 80
    return body


def _text(chance: random.Random, most_words: int) -> str:
    return " ".join(chance.choice(_WORDS) for _ in range(chance.randint(1, most_words)))
