"""From a file, a folder or the hub to the samples of a run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_training.data import sources
from prefillshare_training.data.rows import Row, parse

if TYPE_CHECKING:
    from rich.console import Console

    from prefillshare_training.data.presets import Preset
    from prefillshare_training.data.rendering import Renderer
    from prefillshare_training.samples import Sample

SHOWN_PROBLEMS = 5
REPORT_EVERY = 50

Report = Callable[[int, int], None]
"""Called with the number of samples so far, and of those wanted."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """What a run learns from, and where it came from."""

    samples: tuple[Sample, ...]
    """In the order of the source."""
    sha256: str
    """Of the whole source: the files' bytes, or the rows of the hub."""
    source: str
    skipped: int = 0
    """Bad rows that were left out."""
    problems: tuple[Problem, ...] = ()
    """What is wrong with the first of them."""
    too_long: int = 0
    """Rows left out because a turn is longer than the limit: a cut answer would be learned as
    it is."""

    @property
    def turns(self) -> int:
        """Answers in all samples."""
        return sum(len(sample.turns) for sample in self.samples)

    @property
    def tokens(self) -> tuple[int, int]:
        """Prompt and completion tokens of all turns; what turns share counts for each."""
        turns = [turn for sample in self.samples for turn in sample.turns]
        prompt = sum(len(turn.prompt_ids) for turn in turns)
        return prompt, sum(len(turn.completion_ids) for turn in turns)


def load(
    source: str,
    renderer: Renderer,
    *,
    preset: str | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    max_length: int = 1024,
    seed: int = 0,
    progress: Report | None = None,
) -> Dataset:
    """Read, check and render the rows of `source`.

    Args:
        source: a JSONL, JSON or parquet file, a folder of these, a hub id, or a preset's name.
        preset: how to read the rows; without one they are in our own formats (see rows.py).
        limit: so many samples, drawn by `seed`; by default the size of the preset's subset.
        skip_bad: leave bad rows out instead of refusing the source.
        max_length: rows with a turn of more tokens, prompt and completion, are left out.

    Raises ConfigError for a source that cannot be read, has bad rows, or leaves nothing.
    """
    found = sources.find(source, preset)
    bad = _Bad(source)
    rows = list(_parsed(found, bad))
    if not skip_bad:
        bad.refuse()
    if limit is None and found.preset is not None:
        limit = found.preset.limit
    wanted = len(rows) if limit is None else min(limit, len(rows))
    order = list(range(len(rows)))
    if wanted < len(rows):
        random.Random(seed).shuffle(order)
    samples: dict[int, Sample] = {}
    too_long = 0
    for done, index in enumerate(order):
        if len(samples) == wanted:
            break
        if progress is not None and done % REPORT_EVERY == 0:
            progress(len(samples), wanted)
        place, row = rows[index]
        try:
            sample = row.render(renderer)
        except ValueError as error:
            bad.add(place, str(error))
            continue
        if _longest(sample) > max_length:
            too_long += 1
            continue
        samples[index] = sample
    if progress is not None:
        progress(len(samples), wanted)
    if not skip_bad:
        bad.refuse()
    if not samples:
        raise _nothing_left(source, bad.count, too_long, max_length)
    return Dataset(
        samples=tuple(samples[index] for index in sorted(samples)),
        sha256=found.sha256(),
        source=source,
        skipped=bad.count,
        problems=tuple(bad.first),
        too_long=too_long,
    )


@contextmanager
def progress_bar(console: Console) -> Iterator[Report]:
    """A bar for `load`, gone when it is done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("render", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@dataclass(slots=True)
class _Bad:
    """Bad rows of a source so far."""

    source: str
    count: int = 0
    first: list[Problem] = field(default_factory=list)

    def add(self, place: str, what: str) -> None:
        self.count += 1
        if len(self.first) < SHOWN_PROBLEMS:
            self.first.append(Problem(place, what, "correct the row, or use --skip-bad"))

    def refuse(self) -> None:
        if not self.count:
            return
        more = self.count - len(self.first)
        rest = Problem(self.source, f"{more} more rows are bad", "correct them, or use --skip-bad")
        raise ConfigError(*self.first, *([rest] if more else []))


def _parsed(found: sources.Source, bad: _Bad) -> Iterator[tuple[str, Row]]:
    for place, value, problem in found.records():
        if problem is not None:
            bad.add(place, problem)
            continue
        try:
            yield place, parse(value if found.preset is None else _converted(found.preset, value))
        except ValueError as error:
            bad.add(place, str(error))


def _converted(preset: Preset, value: object) -> object:
    return preset.convert(value) if isinstance(value, dict) else value


def _longest(sample: Sample) -> int:
    """Tokens of the longest turn."""
    return max(len(turn.prompt_ids) + len(turn.completion_ids) for turn in sample.turns)


def _nothing_left(source: str, bad: int, too_long: int, max_length: int) -> ConfigError:
    if too_long:
        what = f"all {too_long} readable rows are longer than {max_length} tokens"
        return ConfigError(Problem(source, what, "raise --max-length"))
    what = f"all {bad} rows are bad" if bad else "holds no rows"
    return ConfigError(Problem(source, what, "write one JSON object per line"))
