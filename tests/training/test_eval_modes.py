"""How much of a prompt each mode takes from the base."""

import pytest

from prefillshare_server.errors import ConfigError
from prefillshare_training.evaluate.modes import (
    Mode,
    Ratio,
    base_layers,
    base_positions,
    parse,
)


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("own", "own"),
        ("shared", "shared"),
        ("0.25", Ratio(0.25)),
        ("0.25:layer", Ratio(0.25, "layer")),
        ("1:prefix", Ratio(1.0)),
        (".5", Ratio(0.5)),
    ],
)
def test_modes_are_read(text: str, mode: Mode) -> None:
    assert parse(text) == mode


@pytest.mark.parametrize("mode", [Ratio(0.25), Ratio(0.125, "layer"), Ratio(1.0)])
def test_a_ratio_prints_as_it_is_read(mode: Ratio) -> None:
    assert parse(str(mode)) == mode


@pytest.mark.parametrize("text", ["1.5", "half", "0.5:head", "-0.5", ""])
def test_other_words_are_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write own, shared, or a ratio"):
        parse(text)


@pytest.mark.parametrize(
    ("mode", "prompt_tokens", "expected"),
    [
        ("own", 101, 0),
        ("shared", 101, 100),
        ("shared", 1, 0),
        (Ratio(0.29), 101, 29),
        (Ratio(0.999), 101, 99),
        (Ratio(1.0), 101, 100),
        (Ratio(0.5), 1, 0),
        (Ratio(0.5, "layer"), 101, 100),
    ],
)
def test_the_last_prompt_token_is_never_the_base_s(
    mode: Mode, prompt_tokens: int, expected: int
) -> None:
    assert base_positions(mode, prompt_tokens) == expected


@pytest.mark.parametrize(("ratio", "expected"), [(0, 0), (0.125, 1), (0.1, 0), (0.5, 2), (1, 4)])
def test_layers_are_rounded_half_up(ratio: float, expected: int) -> None:
    assert base_layers(Ratio(ratio, "layer"), 4) == expected
