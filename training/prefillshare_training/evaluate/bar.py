"""Progress of an evaluation: how many items are done, and the accuracy so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from rich.console import Console

LINE_EVERY_S = 30.0

Report = Callable[[int, float], None]
"""Called with the number of scored items and their accuracy in percent."""


@contextmanager
def accuracy_bar(console: Console, title: str, total: int) -> Iterator[Report]:
    """A bar on a terminal; on a pipe, a line now and then."""
    if not console.is_terminal:
        yield _lines(console, title, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total, accuracy="")
        yield lambda done, percent: bar.update(
            task, completed=done, accuracy=f"{percent:.1f} % right"
        )


def _lines(console: Console, title: str, total: int) -> Report:
    last = time.monotonic()

    def report(done: int, percent: float) -> None:
        nonlocal last
        if time.monotonic() - last > LINE_EVERY_S:
            last = time.monotonic()
            console.print(f"{title}  {done}/{total}  {percent:.1f} % right", highlight=False)

    return report
