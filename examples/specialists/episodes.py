"""What the graph's state holds when a role's turn comes, and what the role should answer.

An episode is one run of the graph as it should go. Its messages have the roles' words and the
tools' real output, so that a prompt made here is the prompt that the served graph sends.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from examples.react.roles import CALCULATE
from examples.react.tools import calculator, described
from examples.specialists.places import Place

Message = dict[str, Any]


@dataclass(frozen=True)
class Episode:
    """A question about two places, and how the graph answers it."""

    question: str
    high: Place
    low: Place
    order: tuple[Place, Place]
    """The places as the question names them: so they are looked up."""

    @cached_property
    def expression(self) -> str:
        return f"{self.high.height_m} / {self.low.height_m}"

    @cached_property
    def calculation(self) -> str:
        """What the calculator says: "8849 / 330 = 26.82"."""
        result: str = calculator.invoke({"expression": self.expression})
        return result

    @property
    def number(self) -> str:
        """The result, as the calculator writes it."""
        return self.calculation.rpartition(" = ")[2]

    @property
    def answer(self) -> str:
        return _capitalised(
            f"{self.high.spoken} is {self.number} times higher than {self.low.spoken}"
        )

    def next_step(self, known: int) -> str:
        """What to do next when `known` heights have been looked up."""
        return CALCULATE if known == 2 else self.order[known].name

    def plan(self, known: int) -> Message:
        """The planner's turn."""
        step = self.next_step(known)
        thoughts = (f"I need the height of {step}", f"Now I need the height of {step}")
        thought = "Both heights are known" if known == 2 else thoughts[known]
        return said({"thought": thought, "next": step})

    def call(self, known: int) -> Message:
        """The tool caller's turn."""
        if known == 2:
            return tool_call("calculator", {"expression": self.expression})
        return tool_call("lookup", {"place": self.order[known].name})

    def result(self, known: int) -> Message:
        """What the tool answers."""
        if known == 2:
            return observed(self.calculation)
        place = self.order[known]
        return observed(described(place.name, place.height_m, place.about))

    def so_far(self, rounds: int) -> list[Message]:
        """The question, and `rounds` times the planner, the tool caller and the tool."""
        messages: list[Message] = [{"role": "user", "content": self.question}]
        for known in range(rounds):
            messages += [self.plan(known), self.call(known), self.result(known)]
        return messages

    def solution(self) -> Message:
        """The solver's turn."""
        return said({"answer": self.answer})

    def judgement(self, stated: str) -> Message:
        """The critic's turn on an answer that gives the number `stated`."""
        verdict = "right" if stated == self.number else "wrong"
        reason = f"The result is {self.number} and the answer says {stated}"
        return said({"reason": reason, "verdict": verdict})


def said(value: Message) -> Message:
    """An assistant's answer in JSON."""
    return {"role": "assistant", "content": json.dumps(value)}


def tool_call(name: str, arguments: Message) -> Message:
    """An assistant's tool call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call-{name}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def observed(text: str) -> Message:
    """A tool's result."""
    return {"role": "tool", "tool_call_id": "call", "content": text}


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
