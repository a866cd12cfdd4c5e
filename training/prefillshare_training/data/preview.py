"""A dry run: what the base computes, what the decoder reads, and what it learns, in colours."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from prefillshare_training.data.rendering import Renderer
    from prefillshare_training.samples import Sample, Turn


class Span(NamedTuple):
    """A part of a turn, its label and colour."""

    label: str
    style: str
    meaning: str


BASE = Span("base", "cyan", "the prompt up to its last token: KV of the frozen base, no gradient")
DECODER = Span("decoder", "yellow", "the last token of the prompt: where the decoder sets in")
LOSS = Span("loss", "green", "the answer: what the decoder learns to generate, token by token")


def preview(
    samples: Sequence[Sample],
    renderer: Renderer,
    console: Console,
    *,
    count: int = 3,
    seed: int = 0,
) -> None:
    """Print `count` of `samples`, drawn by `seed`, with the spans of each turn, and a legend."""
    legend = Table.grid(padding=(0, 2))
    for span in (BASE, DECODER, LOSS):
        legend.add_row(Text(span.label, f"bold {span.style}"), Text(span.meaning))
    console.print(legend)
    chosen = random.Random(seed).sample(range(len(samples)), min(count, len(samples)))
    for index in sorted(chosen):
        console.print()
        console.print(Text(f"sample {index + 1} of {len(samples)}", "bold"))
        known: Turn | None = None
        for number, turn in enumerate(samples[index].turns, 1):
            several = len(samples[index].turns) > 1
            heading = f"turn {number}, " if several else ""
            console.print(Padding(_turn(turn, known, heading, renderer), (0, 0, 0, 2)))
            known = turn


def _turn(turn: Turn, known: Turn | None, heading: str, renderer: Renderer) -> Group:
    """`known` is the turn before, whose tokens are not written out again."""
    prompt, completion = turn.prompt_ids, turn.completion_ids
    base = len(prompt) - 1
    again = min(_common(prompt, known), base) if known else 0
    counts = f"{len(prompt) + len(completion)} tokens: {base} base, 1 decoder, "
    spans = Table.grid(padding=(0, 2))
    spans.add_column(no_wrap=True)
    if base:
        text = Text()
        if again:
            text.append(f"… the first {again} tokens as before …\n", "dim")
        text.append(_shown(renderer.decode(prompt[again:base])), BASE.style)
        spans.add_row(Text(BASE.label, f"bold {BASE.style}"), text)
    for span, ids in ((DECODER, prompt[base:]), (LOSS, completion)):
        text = Text(_shown(renderer.decode(ids)), span.style)
        spans.add_row(Text(span.label, f"bold {span.style}"), text)
    return Group(Text(f"{heading}{counts}{len(completion)} loss", "dim"), spans)


def _common(prompt: Sequence[int], known: Turn) -> int:
    """Leading tokens that `prompt` has in common with the turn before it."""
    before = (*known.prompt_ids, *known.completion_ids)
    pairs = enumerate(zip(prompt, before, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(before)))


def _shown(text: str) -> str:
    """`text` with line ends made visible, and nothing in it that a terminal would obey."""
    visible = "".join(
        char if char.isprintable() else "⏎\n" if char == "\n" else ascii(char)[1:-1]
        for char in text
    )
    return visible.removesuffix("\n")
