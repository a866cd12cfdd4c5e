"""A dry run shows which token is whose, with and without colours."""

import io
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from prefillshare_server.config import LayoutSettings
from prefillshare_training.data import Renderer, preview
from prefillshare_training.samples import Sample


@pytest.fixture(scope="module")
def renderer(tiny_home: Path) -> Renderer:
    return Renderer.for_base(tiny_home / "models" / "tiny-base", LayoutSettings())


def shown(renderer: Renderer, *samples: Sample, colours: bool = False, seed: int = 0) -> str:
    file = io.StringIO()
    system: Literal["standard"] | None = "standard" if colours else None
    console = Console(file=file, width=100, force_terminal=colours, color_system=system)
    preview(samples, renderer, console, seed=seed)
    return file.getvalue()


def test_spans_are_labelled_and_counted(renderer: Renderer) -> None:
    text = shown(renderer, renderer.text("a question:", " yes"))
    assert "\x1b" not in text
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[4:] == [
        "sample 1 of 1",
        "  16 tokens: 10 base, 1 decoder, 5 loss",
        "  base     a question",
        "  decoder  :",
        "  loss      yes<|im_end|>",
    ]
    assert [line.split()[0] for line in lines[:3]] == ["base", "decoder", "loss"]


def test_spans_have_colours(renderer: Renderer) -> None:
    text = shown(renderer, renderer.text("a question:", " yes"), colours=True)
    for style, span in ((36, "a question"), (33, ":"), (32, " yes<|im_end|>")):
        assert f"\x1b[{style}m{span}" in text


def test_a_prompt_of_one_token_has_no_base_span(renderer: Renderer) -> None:
    text = shown(renderer, renderer.text("q", "yes"))
    assert "5 tokens: 0 base, 1 decoder, 4 loss" in text
    assert [line.split()[0] for line in text.splitlines()[6:]] == ["decoder", "loss"]


def test_data_is_shown_as_it_is(renderer: Renderer) -> None:
    text = shown(renderer, renderer.text("[bold]a[/bold] [/nothing]\n:", "\x1b[31m[red]\ttab"))
    assert "[bold]a[/bold] [/nothing]⏎" in text
    assert "\\x1b[31m[red]\\ttab<|im_end|>" in text


def test_a_later_turn_does_not_repeat_the_conversation(renderer: Renderer) -> None:
    messages = [
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "second question"},
        {"role": "assistant", "content": "second answer"},
    ]
    sample = renderer.conversation(messages)
    text = shown(renderer, sample)
    assert "turn 1, " in text
    assert "turn 2, " in text
    assert text.count("first question") == 1
    known = len(sample.turns[0].prompt_ids) + len(sample.turns[0].completion_ids)
    assert f"… the first {known} tokens as before …" in text


def test_three_samples_are_drawn_by_the_seed(renderer: Renderer) -> None:
    samples = [renderer.text(f"{number:02d}:", "yes") for number in range(20)]
    drawn = [shown(renderer, *samples, seed=seed) for seed in (0, 0, 1)]
    assert [text.count("of 20") for text in drawn] == [3, 3, 3]
    assert drawn[0] == drawn[1] != drawn[2]
