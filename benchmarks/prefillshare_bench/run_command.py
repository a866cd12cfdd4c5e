"""``prefillshare bench run``: the command line."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from shutil import copy2
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from prefillshare_bench.choices import Seed, one_of
from prefillshare_server.errors import ConfigError, Problem

if TYPE_CHECKING:
    from prefillshare_bench.experiments import Experiment
    from prefillshare_bench.records import CallRecord
    from prefillshare_bench.runs import Plan, Point

Progressed = Callable[["Point"], Callable[["CallRecord"], None]]


def run_command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERIMENT…",
            help="What to measure: names of [bold]list[/bold], or workload files.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="FOLDER",
            help="Where the measurements go. Those that are there already are not repeated.",
        ),
    ] = Path("results"),
    size: Annotated[
        str, typer.Option("--size", help="How large: see [bold]prefillshare bench list[/bold].")
    ] = "small",
    base: Annotated[
        str,
        typer.Option("--base", help="The base: store name, directory, or Hugging Face hub id."),
    ] = "smollm2-135m-instruct",
    systems: Annotated[
        list[str] | None,
        typer.Option(
            "--system",
            help="Only this system; may be repeated. By default those of the experiment.",
            show_default=False,
        ),
    ] = None,
    rates: Annotated[
        list[float] | None,
        typer.Option(
            "--rate",
            min=1e-6,
            help="Sessions per second; may be repeated. By default those of the size.",
            show_default=False,
        ),
    ] = None,
    closed_loop: Annotated[
        list[int] | None,
        typer.Option(
            "--closed-loop",
            metavar="N",
            min=1,
            help="N sessions at once, the next one when one has ended, instead of arrivals at "
            "random times; may be repeated.",
            show_default=False,
        ),
    ] = None,
    sessions: Annotated[
        int | None,
        typer.Option(
            "--sessions",
            min=1,
            help="Of each point. By default those of the size.",
            show_default=False,
        ),
    ] = None,
    caps: Annotated[
        list[int] | None,
        typer.Option(
            "--max-sessions",
            min=0,
            help="Most sessions at once, others wait; may be repeated, 0 is no limit. By default "
            "those of the size. The best one counts for each system.",
            show_default=False,
        ),
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(
            "--blocks",
            min=2,
            help="KV blocks per worker. By default those of the size.",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option("--repeats", min=1, help="Measurements of each point, each of other tokens."),
    ] = 1,
    seed: Seed = 0,
    again: Annotated[
        bool,
        typer.Option("--again", help="Also measure the points again in which calls failed."),
    ] = False,
) -> None:
    """Measure experiments, each system from nothing and alone on the machine.

    Can be stopped at any time: the same command goes on where it was. A system
    that does not start is told of and left out, and the command then ends with
    code 1.

    [dim]Examples:[/dim]

      prefillshare bench run attribution prediction

      prefillshare bench run react --system prefillshare --system per_model
      --rate 0.1 --repeats 3

      prefillshare bench run react --size paper --base meta-llama/Llama-3.1-8B
    """
    from prefillshare_bench import machine, runs
    from prefillshare_bench.experiments import SIZES, Load
    from prefillshare_bench.systems import SYSTEMS, require_context

    machine.revision()  # What is loaded now is what runs, whatever happens to the files.
    one_of("--system", systems or (), SYSTEMS)
    one_of("--size", [size], SIZES)
    chosen = replace(
        SIZES[size],
        rates=tuple(dict.fromkeys(rates or SIZES[size].rates)),
        sessions=sessions or SIZES[size].sessions,
        caps=tuple(dict.fromkeys(cap or None for cap in caps)) if caps else SIZES[size].caps,
        limits=tuple(dict.fromkeys(cap for cap in caps or () if cap)) or SIZES[size].limits,
        blocks=blocks or SIZES[size].blocks,
    )
    experiments = _experiments(names)
    if closed_loop:
        if rates or caps:
            other = "--rate" if rates else "--max-sessions"
            raise ConfigError(
                Problem("--closed-loop", f"does not go with {other}", "give one or the other")
            )
        loads = tuple(Load(limit=number) for number in dict.fromkeys(closed_loop))
        experiments = {
            title: replace(experiment, loads=lambda _: loads)
            for title, experiment in experiments.items()
        }
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    given = {"--rate": rates, "--max-sessions": caps, "--sessions": sessions}
    for option in (option for option, value in given.items() if value):
        for title, experiment in experiments.items():
            if option in experiment.fixed:
                console.print(f"[yellow]{title}:[/] {option} has no effect on it")
    failed = False
    with runs.scratch_folder() as name:
        scratch = Path(name)
        # All is known to be possible before the first hour is spent.
        todo: list[tuple[str, int, list[Plan]]] = []
        for title, experiment in experiments.items():
            points = runs.points(
                title,
                experiment,
                chosen,
                repeats=repeats,
                seed=seed,
                only=tuple(dict.fromkeys(systems or ())),
            )
            runs.require_one_loop(points, out / title)
            plans = runs.plans(points, base, chosen, scratch, apart=experiment.apart)
            left = [runs.missing(plan, out / title, again=again) for plan in plans]
            todo.append((title, len(points), [plan for plan in left if plan.points]))
        for plan in (plan for _, _, plans in todo for plan in plans):
            require_context(plan.setting)
        number = count()
        for title, total, left in todo:
            folder = _made(out / title)
            missing = sum(len(plan.points) for plan in left)
            about = escape(experiments[title].about)
            console.print(f"[bold]{title}[/]: {about}; {missing} of {total} points to measure")
            for plan in left:
                fresh = scratch / f"start-{next(number)}"
                failed |= not _measured(plan, folder, fresh, console)
    console.print(escape(f"measurements: {out}; now: prefillshare bench report {out}"))
    if failed:
        raise typer.Exit(1)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot be made ({error.strerror})"
        raise ConfigError(Problem("--out", f"{folder} {what}", "name a folder of yours")) from None
    return folder


def _experiments(names: list[str]) -> dict[str, Experiment]:
    """By the name of the folder of each. Raises ConfigError for two of one name."""
    found: dict[str, Experiment] = {}
    for name in names:
        title = Path(name).stem if _is_file(name) else name
        if title in found:
            what = f"{title} is there twice, and would be measured into one folder"
            raise ConfigError(Problem("EXPERIMENT", what, "name it once, or rename a file"))
        found[title] = _experiment(name)
    return found


def _experiment(name: str) -> Experiment:
    from prefillshare_bench.experiments import EXPERIMENTS, of_file

    if _is_file(name):
        return of_file(Path(name))
    one_of("EXPERIMENT", [name], EXPERIMENTS)
    return EXPERIMENTS[name]


def _is_file(name: str) -> bool:
    from prefillshare_bench.experiments import EXPERIMENTS

    path = Path(name)
    return name not in EXPERIMENTS and (path.suffix == ".jsonl" or path.exists())


def _measured(plan: Plan, folder: Path, scratch: Path, console: Console) -> bool:
    """Whether the system could be measured; what was wrong is told, and its logs are kept."""
    from prefillshare_bench import runs

    def on_failures(point: Point, what: str) -> None:
        console.print(f"[yellow]{point.file}:[/] {escape(what)}")

    try:
        with _progress(console, plan.system) as on_point:
            runs.measure(plan, folder, scratch, on_point=on_point, on_failures=on_failures)
    except ConfigError:
        raise
    except Exception as error:  # Whatever one system dies of, the others are measured.
        logs = _kept(scratch / plan.system, folder / "logs" / Path(plan.points[0].file).stem)
        what = str(error) or type(error).__name__
        console.print(f"[red]{plan.system} left out:[/] {escape(f'{what} (see {logs})')}")
        return False
    return True


def _kept(scratch: Path, logs: Path) -> Path:
    """Copies a system's files, which are about to go, and writes down where the error was."""
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
    for file in (*scratch.glob("*.log"), *scratch.glob("*.yaml")):
        copy2(file, logs)
    return logs


@contextmanager
def _progress(console: Console, system: str) -> Iterator[Progressed]:
    """A bar of calls for each point."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("calls"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        starting = progress.add_task(f"{system}: starting", total=None)

        def on_point(point: Point) -> Callable[[CallRecord], None]:
            progress.update(starting, visible=False)
            label = f"{system} {point.workload.name} {point.load} #{point.repeat}"
            task = progress.add_task(label, total=point.workload.calls)

            def on_call(call: CallRecord) -> None:
                progress.advance(task)

            return on_call

        yield on_point
