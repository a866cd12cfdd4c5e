"""The examples on real engines: they say what is recorded, and a role switch shares."""

import re
from itertools import pairwise
from typing import Any

import pytest

from examples.record import (
    COLUMNS,
    CONTROL,
    HERE,
    LINT,
    TASKS,
    read_notebook,
    run_notebook,
    without_ids,
)
from prefillshare_server.cli import app
from tests.examples.conftest import Run
from tests.served import Served

pytestmark = pytest.mark.engine

BLOCK = 32
"""Tokens that are cached together."""

ONE_HISTORY = sorted(TASKS.keys() - {"supervisor"})
"""Examples whose roles all read one conversation."""


@pytest.mark.parametrize("name", TASKS)
def test_a_run_prints_what_is_recorded(name: str, runs: dict[str, Run]) -> None:
    [first, *_] = recorded(name)
    command, _, printed = first.partition("\n")

    assert command == f"python -m examples.{name} --task {TASKS[name]}"
    assert runs[name].printed == printed, "after a wanted change: python -m examples.record"


def recorded(name: str) -> list[str]:
    """The recorded commands, each with what it printed."""
    text = (HERE / name / "recorded.txt").read_text()
    return text.removeprefix("$ ").split("\n$ ")


@pytest.mark.parametrize("name", TASKS)
def test_a_context_only_grows(name: str, runs: dict[str, Run]) -> None:
    for calls in (session.calls for session in runs[name].sessions):
        assert [call.prefix_break for call in calls if call.prefix_break] == []
        assert {call.affinity for call in calls[1:]} == {"hit"}


@pytest.mark.parametrize("name", ONE_HISTORY)
def test_what_one_role_read_no_other_role_reads_again(name: str, runs: dict[str, Run]) -> None:
    """A call finds what the one before it found, and so on: it computes what is new, and its tail.

    Within a block, for roles that read the same context also share how their tails begin.
    """
    for calls in (session.calls for session in runs[name].sessions):
        found = [call.cached_tokens for call in calls]

        assert found[0] == 0
        assert found[1] >= BLOCK
        assert all(later >= earlier - BLOCK for earlier, later in pairwise(found))
        assert found[-1] > calls[-1].prompt_tokens / 2


def test_histories_that_part_share_their_beginning(runs: dict[str, Run]) -> None:
    [calls] = (session.calls for session in runs["supervisor"].sessions)

    assert calls[0].cached_tokens == 0
    assert min(call.cached_tokens for call in calls[1:]) >= BLOCK
    assert [call.role for call in calls] == [
        *["planner", "toolcaller"] * 3,
        "solver",
        "critic",
    ]


def test_three_lines_make_a_tutorial_graph_share(runs: dict[str, Run]) -> None:
    found = re.search(r"([\d,]+) of ([\d,]+) prompt tokens were cached", runs[CONTROL].printed)
    assert found is not None
    cached, prompt = (int(number.replace(",", "")) for number in found.groups())
    [session] = runs[CONTROL].sessions
    after = session.usage

    assert after.cached_tokens / after.prompt_tokens > 2 * cached / prompt


def test_in_the_models_own_layout_the_three_lines_share_nothing_more(
    runs: dict[str, Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", COLUMNS)
    [_, control] = recorded(CONTROL)
    command, _, printed = control.partition("\n")

    app([LINT[0], str(runs[CONTROL].trace), *LINT[2:]], standalone_mode=False)

    assert command == f"prefillshare {' '.join(LINT)}"
    shown = without_ids(capsys.readouterr().out)
    assert shown == printed
    before, after, _ = (float(part) for part in re.findall(r"([\d.]+)% shared", shown))
    assert after < before


def test_the_notebook_says_what_is_recorded(served: Served) -> None:
    assert texts(run_notebook(f"{served.url}/v1")) == texts(read_notebook())


def texts(notebook: Any) -> list[Any]:
    """The outputs of every cell, as text."""
    return [
        [output.get("text") or output["data"]["text/plain"] for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
