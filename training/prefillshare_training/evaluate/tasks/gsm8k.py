"""GSM8K: word problems of grade school maths; the answer is a number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_training.data import sources
from prefillshare_training.data.presets import PRESETS, gsm8k
from prefillshare_training.evaluate.tasks import text
from prefillshare_training.evaluate.tasks.task import Item

if TYPE_CHECKING:
    from prefillshare_training.data.rendering import Renderer

_MARKED = re.compile(r"####\s*([-\N{MINUS SIGN}]?\$?[\d.,]+)")
_SPLIT = "test"


@dataclass(frozen=True)
class Gsm8k:
    """The question as the user's message, as in the training preset of the same name."""

    source: str = PRESETS["gsm8k"].hub_id
    """JSONL file, a folder with a file named test…, or a hub id."""
    name: str = "gsm8k"
    max_tokens: int = 512

    def items(self, renderer: Renderer) -> list[Item]:
        """The rows of the test split."""
        found = []
        for index, (place, row) in enumerate(self._rows()):
            try:
                question, answer = gsm8k(row)["messages"]
            except ValueError as error:
                raise _bad(place, str(error)) from None
            expected = _expected(answer["content"])
            if expected is None:
                raise _bad(place, "answer: has no `#### N` line")
            prompt = tuple(renderer.prompt([question]))
            found.append(Item(f"gsm8k-{index}", prompt, expected))
        return found

    def score(self, item: Item, text_: str) -> Mapping[str, float]:
        """``flexible``: the marked number, else the last; ``strict``: the marked one alone."""
        expected = text.number(item.expected)
        marked = _MARKED.findall(text_)
        strict = text.number(marked[0]) if marked else None
        flexible = strict if strict is not None else text.last_number(text_)
        return {"flexible": float(flexible == expected), "strict": float(strict == expected)}

    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        path = Path(self.source).expanduser()
        if path.is_dir():
            path = _test_file(path)
        if not path.exists() and _is_hub_id(self.source):
            yield from _hub_rows(self.source)
            return
        for place, value, problem in sources.find(str(path), None).records():
            if problem is not None or not isinstance(value, Mapping):
                raise _bad(place, problem or "is no object")
            yield place, value


def _expected(answer: str) -> str | None:
    marked = _MARKED.findall(answer)
    return marked[-1] if marked and text.number(marked[-1]) is not None else None


def _test_file(folder: Path) -> Path:
    found = [
        file
        for suffix in (".jsonl", ".json", ".parquet")
        for file in sorted(folder.rglob(f"{_SPLIT}*{suffix}"))
    ]
    if not found:
        raise ConfigError(
            Problem(str(folder), f"holds no {_SPLIT}*.jsonl or .parquet", "point to the file")
        )
    return found[0]


def _is_hub_id(source: str) -> bool:
    return (
        source.count("/") == 1
        and not source.startswith((".", "/", "~"))
        and not (source.endswith((".jsonl", ".json", ".parquet")))
    )


def _hub_rows(hub_id: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import datasets

    try:
        rows = datasets.load_dataset(hub_id, PRESETS["gsm8k"].config, split=_SPLIT)
    # Its failures have no common class: of the network, the hub, the cache, the files.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            Problem(
                f"data {hub_id}",
                f"cannot be loaded from the hub ({reason})",
                "check the network, or give the test file of GSM8K with --data test.jsonl",
            )
        ) from None
    for index, row in enumerate(rows):
        yield f"{hub_id}: row {index + 1}", row


def _bad(place: str, what: str) -> ConfigError:
    return ConfigError(Problem(place, what, 'write {"question": …, "answer": "… #### N"}'))
