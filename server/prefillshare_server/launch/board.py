"""Shows how far each worker's start is."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from prefillshare_server.launch.local_cluster import OnEvent, State

_WORDS: dict[State, str] = {
    "starting": "starting vLLM",
    "loading": "loading the model",
    "warming": "warming up",
    "ready": "[green]ready[/green]",
    "failed": "[red]failed[/red]",
}


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
