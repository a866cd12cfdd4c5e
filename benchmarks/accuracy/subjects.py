"""What the specialists of the tables are trained for, and what measures them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accuracy import tool_calls
from examples.specialists import generate
from prefillshare_server.errors import ConfigError, Problem

SEED = 0
"""Of the data that is drawn or made up here; another one would be another experiment."""


ROWS_OF_A_ROLE = 400
"""To train on."""


class Measure(NamedTuple):
    """A column of the tables: a task of `prefillshare eval`."""

    task: str
    max_tokens: int
    match: str | None = None


class Data(NamedTuple):
    """Of a subject."""

    train: Path
    test: Path | None
    """None where the task brings its own."""
    about: Mapping[str, Any]


class Subject(NamedTuple):
    """One job to learn."""

    measures: Mapping[str, Measure]
    """By the name that they have in the results."""
    training: Mapping[str, Any]
    """Settings of the trainer, the same for all its methods."""
    learning_rate: float
    """Of all weights."""
    lora_learning_rate: float
    data: Callable[[Path, Path], Data]
    """Writes what it makes to the first folder; the second has GSM8K."""


def _tools(work: Path, gsm8k: Path) -> Data:
    found = tool_calls.training_data()
    path = work / "tool_calls.jsonl"
    tool_calls.write(found.rows, path)
    about = {
        "train": f"BFCL {' and '.join(tool_calls.TRAINING)}",
        "test": f"BFCL {' and '.join(tool_calls.TEST)}",
        "rows": len(found.rows),
        "left_out_as_like_a_test_item": found.overlapping,
    }
    return Data(path, None, about)


def _math(work: Path, gsm8k: Path) -> Data:
    train, test = gsm8k / "train.jsonl", gsm8k / "test.jsonl"
    for path in (train, test):
        if not path.is_file():
            raise ConfigError(
                Problem(f"--gsm8k {gsm8k}", f"has no {path.name}", "name the folder with both")
            )
    return Data(train, test, {"train": "GSM8K train", "test": "GSM8K test"})


def _role(name: str) -> Callable[[Path, Path], Data]:
    def data(work: Path, gsm8k: Path) -> Data:
        train, test = work / f"{name}.jsonl", work / f"{name}-test.jsonl"
        generate.write(train, generate.rows(name, "train", ROWS_OF_A_ROLE, seed=SEED))
        generate.write(test, generate.held_out(name, seed=SEED))
        made = f"examples.specialists.generate --number {ROWS_OF_A_ROLE} --seed {SEED}"
        return Data(train, test, {"train": f"{made}: {train.name}", "test": f"{made}: {test.name}"})

    return data


_ROLE_TRAINING = {
    "max_length": 1024,
    "accumulation": 2,
    "epochs": 1,
    # The ReAct example's, see its cluster file.
    "layout": {"tail_role": "user"},
}

SUBJECTS = {
    "tools": Subject(
        {
            "bfcl-simple-python": Measure("bfcl-simple-python", 160),
            "bfcl-multiple": Measure("bfcl-multiple", 160),
        },
        {"max_length": 640, "accumulation": 3, "epochs": 2},
        learning_rate=1e-4,
        lora_learning_rate=2e-4,
        data=_tools,
    ),
    **{
        name: Subject(
            {f"react-{name}": Measure("exact", 96, match="json")},
            _ROLE_TRAINING,
            learning_rate=3e-4,
            lora_learning_rate=1e-3,
            data=_role(name),
        )
        for name in ("toolcaller", "solver")
    },
    "math": Subject(
        {"gsm8k": Measure("gsm8k", 256)},
        {"preset": "gsm8k", "max_length": 512, "accumulation": 3, "epochs": 1, "limit": 2000},
        learning_rate=1e-4,
        lora_learning_rate=5e-4,
        data=_math,
    ),
}
"""By name. The roles are those of the ReAct example, with its generator."""
