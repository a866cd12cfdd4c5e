"""Every example has what a reader needs, and the diffs that READMEs show are those of the files."""

import difflib
import json
import re
from pathlib import Path

import pytest

from examples.record import CONTROL, HERE, LINT, TASKS

FOLDERS = sorted(path.parent for path in HERE.glob("*/README.md"))


def test_the_list_of_examples_is_complete() -> None:
    listed = re.findall(r"^\| \[.+?\]\((\w+)\)", (HERE / "README.md").read_text(), re.MULTILINE)

    assert sorted(listed) == sorted({path.name for path in FOLDERS} - {"specialists"})


@pytest.mark.parametrize("name", TASKS)
def test_an_example_has_inputs_and_recorded_output(name: str) -> None:
    folder = HERE / name
    readme = (folder / "README.md").read_text()
    lines = (folder / "questions.jsonl").read_text().splitlines()

    assert all(json.loads(line)["question"] for line in lines)
    assert f"python -m examples.{name}" in readme
    assert "(recorded.txt)" in readme
    assert "Who decides what" in readme


@pytest.mark.parametrize("name", TASKS)
def test_the_list_of_examples_has_the_recorded_figures(name: str) -> None:
    recorded = (HERE / name / "recorded.txt").read_text()
    [row] = re.findall(rf"^\| \[{name}\].+", (HERE / "README.md").read_text(), re.MULTILINE)
    *_, sums = re.findall(r"│ all +│ +\d+ │ +([\d,]+) │ +([\d,]+) │", recorded)
    *_, ratio = re.findall(r"([\d.]+) times as many", recorded)
    prompt, cached = (int(number.replace(",", "")) for number in sums)

    assert f"{round(100 * cached / prompt)} % | {ratio} × |" in row


def test_the_readme_of_the_control_has_the_recorded_figures() -> None:
    recorded = (HERE / CONTROL / "recorded.txt").read_text()
    readme = " ".join((HERE / CONTROL / "README.md").read_text().split())
    before, after, _ = re.findall(r"([\d.]+)% shared", recorded)

    assert f"after.py shares {after} % there and before.py {before} %" in readme
    assert f"prefillshare {' '.join(LINT)}" in readme


@pytest.mark.parametrize("name", ["plain_openai", "tutorial_graph"])
def test_a_readme_shows_the_diff_of_the_files(name: str) -> None:
    folder = HERE / name
    [shown] = re.findall(
        r"^```diff\n(.+?)^```", (folder / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    before, after = ((folder / f"{file}.py").read_text() for file in ("before", "after"))

    assert shown == "".join(changes(before, after))


def changes(before: str, after: str) -> list[str]:
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    return list(difflib.unified_diff(old, new, "before.py", "after.py", n=1))


@pytest.mark.parametrize(("name", "lines"), [("plain_openai", 1), ("tutorial_graph", 3)])
def test_that_many_lines_change(name: str, lines: int) -> None:
    before, after = ((HERE / name / f"{file}.py").read_text() for file in ("before", "after"))
    changed = [line[0] for line in changes(before, after)[2:] if not line.startswith("@")]

    assert changed.count("-") == changed.count("+") == lines


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_file_that_a_readme_links_to_exists(folder: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (folder / "README.md").read_text())

    assert [link for link in links if "://" not in link and not (folder / link).exists()] == []
