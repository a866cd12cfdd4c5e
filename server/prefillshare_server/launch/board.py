"""Shows how far each worker's start is, and afterwards what becomes of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from prefillshare_server.launch.process import OnEvent, State

_WORDS: dict[State, str] = {
    "starting": "starting vLLM",
    "loading": "loading the model",
    "warming": "warming up",
    "ready": "[green]ready[/green]",
    "failed": "[red]failed[/red]",
    "died": "[red]died[/red]",
}

_NEWS: dict[State, tuple[str, str]] = {
    "died": ("died: {}", "red"),
    "starting": ("is started again ({})", ""),
    "ready": ("is ready again ({})", "green"),
    "failed": ("did not come back, {}", "red"),
}
"""What of a restart is worth a line, and its style."""


@contextmanager
def start_board(console: Console) -> Iterator[OnEvent]:
    """A line with a clock per worker; on a pipe, a line per event."""
    if not console.is_terminal:
        yield lambda worker, state, detail: console.print(
            f"{worker}: {_WORDS[state]} ({detail})", highlight=False, soft_wrap=True
        )
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    lines: dict[str, TaskID] = {}
    with Progress(*columns, console=console) as progress:

        def show(worker: str, state: State, detail: str) -> None:
            if worker not in lines:
                lines[worker] = progress.add_task("", total=1)
            progress.update(
                lines[worker],
                description=f"{worker:<14} {_WORDS[state]}",
                completed=1 if state in ("ready", "failed") else 0,
            )

        yield show


def restart_news(console: Console) -> OnEvent:
    """Prints a line when a worker dies, is started again, is ready or fails to come back."""

    def tell(worker: str, state: State, detail: str) -> None:
        if state in _NEWS:
            words, style = _NEWS[state]
            line = f"{time.strftime('%H:%M:%S')} {worker} {words.format(detail)}"
            # A reason out of a log may look like markup.
            console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    return tell
