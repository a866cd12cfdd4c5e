"""Rows to train and to test the specialists on: `python -m examples.specialists.generate --help`.

A row is one call of one role: its prompt as the served graph sends it, and the answer it should
give. The two halves share no place, no pair of heights and no question.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from examples.react.roles import INSTRUCTIONS, ROLES, TOOLS
from examples.specialists.episodes import Episode, Message, said
from examples.specialists.places import Half, pair

ASKS: dict[Half, tuple[str, ...]] = {
    "train": (
        "How many times higher is {high} than {low}?",
        "How many times as high as {low} is {high}?",
        "By what factor is {high} higher than {low}?",
        "What is the height of {high} divided by the height of {low}?",
        "Compare {one} and {other}: how many times higher is the taller one?",
        "Which is higher, {one} or {other}, and by what factor?",
        "How often would {low} have to be stacked to be as high as {high}?",
        "Find out how many times higher {high} is than {low}.",
    ),
    "held-out": (
        "How many times higher is {high} than {low}?",
        "How many times as high as {low} is {high}?",
        "I would like to know how many times higher {high} is than {low}.",
        "Look at {one} and {other}. How many times higher is the taller one?",
    ),
}

INTROS: dict[Half, tuple[str, ...]] = {
    "train": (
        "A teacher is preparing a lesson about tall things.",
        "Two friends have made a bet.",
        "A newspaper wants a number for its travel pages.",
        "A guide is often asked this on the bus.",
        "The model makers need it for their next exhibition.",
        "This is for a poster in the entrance hall.",
        "An old book gives a number that nobody trusts.",
        "A child asked this at breakfast, and nobody knew.",
        "The heights are in the list that the office keeps.",
        "Last time somebody guessed, and it was embarrassing.",
        "Every number has to be checked before it is printed.",
        "Nobody wants to measure anything, so please use the list and the calculator.",
        "There is room for one short sentence only.",
        "The drawing is nearly done, and only the comparison is missing.",
        "Readers write letters whenever such a number is wrong.",
        "It must be right, because it will be painted on a wall.",
    ),
    "held-out": (
        "The village is building a small park with models of famous places.",
        "A radio host wants to surprise the listeners.",
        "The last brochure had a mistake in it, and many people noticed.",
        "Please use the official heights, and let the calculator do the division.",
        "The sign will be cast in bronze, so it cannot be corrected later.",
        "A puzzle in a magazine asks this, without giving the answer.",
    ),
}

HELD_OUT = 100
"""Held-out rows of each role."""


@dataclass(frozen=True)
class Row:
    """One call of a role."""

    role: str
    episode: Episode
    messages: list[Message]
    """The conversation so far, without the role's instructions."""
    answer: Message
    """The assistant message it should be answered with."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        return TOOLS.get(self.role, [])

    @property
    def prompt(self) -> list[Message]:
        return [{"role": "system", "content": INSTRUCTIONS[self.role]}, *self.messages]

    def to_json(self) -> str:
        row = {"prompt": self.prompt, "completion": [self.answer]}
        return json.dumps(row | ({"tools": self.tools} if self.tools else {}))


def rows(role: str, half: Half, number: int, *, seed: int = 0) -> list[Row]:
    """`number` rows of `role`, always the same for the same arguments."""
    kept = _held_out_comparisons(seed) if half == "train" else frozenset()
    found = (
        _MAKE[role](episode, random)
        for episode, random in _episodes(role, half, seed)
        if episode.expression not in kept
    )
    return list(islice(found, number))


def held_out(role: str, *, seed: int = 0) -> list[Row]:
    """The rows on which a specialist and the base are compared."""
    return rows(role, "held-out", HELD_OUT, seed=seed)


def invent(random: Random, half: Half) -> Episode:
    """A new question, in one of six cases as long as the demo's."""
    long = random.random() < 1 / 6
    sentences = random.randint(3, 4) if long else random.choice((0, 0, 0, 1, 1))
    high, low = pair(random, half, sentences=sentences)
    ask = random.choice(ASKS[half])
    one, other = random.sample((high, low), 2)
    text = ask.format(high=high.spoken, low=low.spoken, one=one.spoken, other=other.spoken)
    intros = random.randint(4, 6) if long else random.choice((0, 0, 1))
    words = " ".join([*random.sample(INTROS[half], intros), text[:1].upper() + text[1:]])
    order = sorted((high, low), key=lambda item: text.index(item.name))
    return Episode(f"Task {random.getrandbits(32):08x}. {words}", high, low, (order[0], order[1]))


def wrong_number(random: Random, episode: Episode) -> str:
    """A number that a careless solver might give: close to the result, or from elsewhere."""
    digits = episode.number
    while True:
        kind = random.choice(("digit", "digit", "swap", "point", "height", "inverse"))
        at = random.randrange(len(digits))
        if kind == "digit" and digits[at].isdigit():
            wrong = digits[:at] + random.choice("123456789") + digits[at + 1 :]
        elif kind == "swap" and at:
            wrong = digits[: at - 1] + digits[at] + digits[at - 1] + digits[at + 1 :]
        elif kind == "point":
            wrong = f"{float(digits) * random.choice((0.1, 10, 100)):.4g}"
        elif kind == "height":
            wrong = str(random.choice(episode.order).height_m)
        else:
            wrong = f"{episode.low.height_m / episode.high.height_m:.2f}"
        if _is_number(wrong) and float(wrong) != float(digits):
            return wrong


def _episodes(role: str, half: Half, seed: int) -> Iterator[tuple[Episode, Random]]:
    """Episodes without end, each with a source of chance of its own."""
    for number in count():
        random = Random(f"{seed} {half} {role} {number}")
        yield invent(random, half), random


@cache
def _held_out_comparisons(seed: int) -> frozenset[str]:
    """The pairs of heights in the held-out rows of all roles."""
    return frozenset(
        episode.expression
        for role in ROLES
        for episode, _ in islice(_episodes(role, "held-out", seed), HELD_OUT)
    )


def _planner(episode: Episode, random: Random) -> Row:
    known = random.randrange(3)
    return Row("planner", episode, episode.so_far(known), episode.plan(known))


def _toolcaller(episode: Episode, random: Random) -> Row:
    # The calculator's numbers are the hard part.
    known = random.choice((0, 1, 2, 2))
    messages = [*episode.so_far(known), episode.plan(known)]
    return Row("toolcaller", episode, messages, episode.call(known))


def _solver(episode: Episode, random: Random) -> Row:
    messages = episode.so_far(3)
    if random.random() < 0.15:  # the second attempt, after the critic's objection
        wrong = wrong_number(random, episode)
        messages += [_answered(episode, wrong), episode.judgement(wrong)]
    return Row("solver", episode, messages, episode.solution())


def _critic(episode: Episode, random: Random) -> Row:
    stated = episode.number if random.random() < 0.5 else wrong_number(random, episode)
    messages = [*episode.so_far(3), _answered(episode, stated)]
    return Row("critic", episode, messages, episode.judgement(stated))


_MAKE = {"planner": _planner, "toolcaller": _toolcaller, "solver": _solver, "critic": _critic}


def _answered(episode: Episode, number: str) -> Message:
    return said({"answer": episode.answer.replace(episode.number, number)})


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def main(
    out: Annotated[Path, typer.Argument(help="A folder; gets <role>.jsonl and <role>-test.jsonl.")],
    number: Annotated[int, typer.Option(help="Training rows of each role.")] = 600,
    seed: Annotated[int, typer.Option(help="Other seed, other rows.")] = 0,
) -> None:
    """Write the rows of all roles, for example: python -m examples.specialists.generate data/"""
    out.mkdir(parents=True, exist_ok=True)
    for role in ROLES:
        write(out / f"{role}.jsonl", rows(role, "train", number, seed=seed))
        write(out / f"{role}-test.jsonl", held_out(role, seed=seed))


def write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(row.to_json() + "\n" for row in rows))


if __name__ == "__main__":
    typer.run(main)
