"""``prefillshare bench``: the commands. Heavy parts are imported by those that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from prefillshare_bench.report.command import report_command
from prefillshare_server.errors import ConfigError, Problem

if TYPE_CHECKING:
    from prefillshare_bench.experiments import Experiment, Size
    from prefillshare_bench.records import CallRecord
    from prefillshare_bench.runs import Plan, Point
    from prefillshare_bench.traces import Workload

app = typer.Typer(
    no_args_is_help=True,
    help="""The paper's evaluation: its workloads, on real engines, beside its baselines.

Each system is started from nothing with the same number of workers, KV blocks and cores, and is
sent the same sessions. What comes of it is a folder of files, one per measurement, from which the
tables and plots are made.

[dim]Try:[/dim]  prefillshare bench run attribution
[dim]then[/dim]  prefillshare bench report results
""",
)

Folder = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="FOLDER",
        help="Where the measurements go. Those that are there already are not repeated.",
    ),
]
SizeName = Annotated[
    str, typer.Option("--size", help="How large: see [bold]prefillshare bench list[/bold].")
]
Base = Annotated[
    str, typer.Option("--base", help="The base: store name, directory, or Hugging Face hub id.")
]
Systems = Annotated[
    list[str] | None,
    typer.Option(
        "--system",
        help="Only this system; may be repeated. By default those of the experiment.",
        show_default=False,
    ),
]
Repeats = Annotated[
    int, typer.Option("--repeats", min=1, help="Measurements of each point, each of other tokens.")
]
Seed = Annotated[int, typer.Option("--seed", help="All tokens and arrivals are drawn with it.")]


@app.command("list")
def list_all() -> None:
    """Show experiments, systems and sizes."""
    from prefillshare_bench.experiments import EXPERIMENTS, SIZES
    from prefillshare_bench.report.labels import SYSTEMS

    console = Console()
    experiments = Table("experiment", "what it answers for", "systems", box=None)
    for name, experiment in EXPERIMENTS.items():
        experiments.add_row(name, experiment.about, ", ".join(experiment.systems))
    sizes = Table("size", "for", "sessions", "lengths", "sessions/s", box=None)
    for name, size in SIZES.items():
        rates = ", ".join(f"{rate:g}" for rate in size.rates)
        sizes.add_row(name, size.about, str(size.sessions), f"x {size.scale:g}", rates)
    systems = Table("system", "what it is", box=None)
    for name, system in SYSTEMS.items():
        systems.add_row(name, system.label)
    for table in (experiments, systems, sizes):
        console.print(table, "")


@app.command("run")
def run(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERIMENT…",
            help="What to measure: names of [bold]list[/bold], or workload files.",
            show_default=False,
        ),
    ],
    out: Folder = Path("results"),
    size: SizeName = "small",
    base: Base = "smollm2-135m-instruct",
    systems: Systems = None,
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
    repeats: Repeats = 1,
    seed: Seed = 0,
) -> None:
    """Measure experiments, each system from nothing and alone on the machine.

    Can be stopped at any time: the same command goes on where it was. A system that does not start
    is told of and left out, and the command then ends with code 1.

    [dim]Examples:[/dim]

      prefillshare bench run attribution prediction

      prefillshare bench run react --system prefillshare --system per_model --rate 0.1 --repeats 3

      prefillshare bench run react --size paper --base meta-llama/Llama-3.1-8B
    """
    from dataclasses import replace

    from prefillshare_bench import runs
    from prefillshare_bench.experiments import Load
    from prefillshare_bench.systems import SYSTEMS

    _one_of("--system", systems or (), SYSTEMS)
    chosen = _size(size)
    chosen = replace(
        chosen,
        rates=tuple(dict.fromkeys(rates or chosen.rates)),
        sessions=sessions or chosen.sessions,
        caps=tuple(dict.fromkeys(cap or None for cap in caps)) if caps else chosen.caps,
        limits=tuple(cap for cap in caps or () if cap) or chosen.limits,
        blocks=blocks or chosen.blocks,
    )
    if closed_loop and (rates or caps):
        other = "--rate" if rates else "--max-sessions"
        raise ConfigError(
            Problem("--closed-loop", f"does not go with {other}", "give one or the other")
        )
    experiments = {Path(name).stem: _experiment(name) for name in names}
    if closed_loop:
        loads = tuple(Load(limit=number) for number in dict.fromkeys(closed_loop))
        experiments = {
            title: replace(experiment, loads=lambda _: loads)
            for title, experiment in experiments.items()
        }
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    failed = False
    with runs.scratch_folder() as name:
        scratch = Path(name)
        for title, experiment in experiments.items():
            folder = out / title
            folder.mkdir(parents=True, exist_ok=True)
            points = runs.points(
                title, experiment, chosen, repeats=repeats, seed=seed, only=systems or ()
            )
            plans = runs.plans(points, base, chosen, scratch, apart=experiment.apart)
            left = [runs.missing(plan, folder) for plan in plans]
            count = sum(len(plan.points) for plan in left)
            console.print(
                f"[bold]{title}[/]: {experiment.about}; {count} of {len(points)} points to measure"
            )
            for plan in left:
                if plan.points:
                    failed |= not _measured(plan, folder, scratch, console)
    console.print(f"measurements: {out}; now: prefillshare bench report {out}")
    if failed:
        raise typer.Exit(1)


def _measured(plan: Plan, folder: Path, scratch: Path, console: Console) -> bool:
    """Whether the system could be measured; what was wrong is told."""
    from prefillshare_bench import runs

    def on_failures(point: Point, what: str) -> None:
        console.print(f"[yellow]{point.file}:[/] {what}")

    try:
        with _progress(console, plan.system) as on_point:
            runs.measure(plan, folder, scratch, on_point=on_point, on_failures=on_failures)
    except ConfigError:
        raise
    except Exception as error:  # Whatever one system dies of, the others are measured.
        what = str(error) or type(error).__name__
        console.print(f"[red]{plan.system} left out:[/] {escape(what)}")
        return False
    return True


@app.command("workload")
def write_workload(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="react, reflexion, swarm, supervisor, input_length, roles_scaling, long_output.",
            show_default=False,
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE.JSONL", show_default=False)],
    sessions: Annotated[int, typer.Option("--sessions", min=1)] = 16,
    scale: Annotated[
        float, typer.Option("--scale", min=0.001, help="Multiplies all lengths.")
    ] = 1.0,
    roles: Annotated[int, typer.Option("--roles", min=1)] = 4,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="First prompt of input_length.")
    ] = 4096,
    seed: Seed = 0,
) -> None:
    """Write one of the paper's workloads as a file, to read it, change it, or run it.

    [dim]Example:[/dim]  prefillshare bench workload react react.jsonl --sessions 4 --scale 0.1
    """
    from prefillshare_bench import traces, workloads

    options: dict[str, Any] = {"sessions": sessions, "seed": seed, "scale": scale}
    built: dict[str, Callable[[], Workload]] = {
        "react": lambda: workloads.react(roles=roles, **options),
        "reflexion": lambda: workloads.reflexion(roles=roles, **options),
        "swarm": lambda: workloads.swarm(roles=roles, **options),
        "supervisor": lambda: workloads.supervisor(roles=roles, **options),
        "input_length": lambda: workloads.input_length(tokens, roles=roles, **options),
        "roles_scaling": lambda: workloads.roles_scaling(roles, **options),
        "long_output": lambda: workloads.long_output(roles=roles, **options),
    }
    _one_of("NAME", [name], built)
    try:
        workload = built[name]()
    except ValueError as error:
        raise ConfigError(Problem(name, str(error), "see --help")) from None
    _told(workload, file, traces.write)


@app.command("import")
def import_log(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG.JSONL…", show_default=False)],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE.JSONL", help="The workload file to write.")
    ] = Path("recorded.jsonl"),
    session_key: Annotated[
        str | None,
        typer.Option(
            "--session-key",
            metavar="FIELD",
            help="The field that names a request's session, dotted, where it is an unusual one.",
            show_default=False,
        ),
    ] = None,
    answer: Annotated[
        int, typer.Option("--answer", min=1, help="Tokens of answers of which the log says none.")
    ] = 128,
    longest_answer: Annotated[
        int | None,
        typer.Option(
            "--longest-answer",
            min=1,
            help="Cut longer answers to so many tokens, for a small machine.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Turn logged OpenAI requests into a workload.

    Takes the file that PREFILLSHARE_TRACE names and other logs of chat requests, a JSON object a
    line. The requests' models become the roles; what they say is sent again as it was.

    [dim]Example:[/dim]  prefillshare bench import trace.jsonl   [dim]then[/dim]
      prefillshare bench run recorded.jsonl --rate 0.1
    """
    from prefillshare_bench import imports, traces

    workload = imports.recorded(
        logs,
        name=out.stem,
        session_key=session_key,
        answer=answer,
        longest_answer=longest_answer,
    )
    _told(workload, out, traces.write)


app.command("report")(report_command)


def _told(workload: Workload, file: Path, write: Callable[[Workload, Path], None]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write(workload, file)
    typer.echo(
        f"{file}: {len(workload.sessions)} sessions, {workload.calls} calls, "
        f"{len(workload.roles)} roles, up to {workload.longest():,} tokens"
    )


def _experiment(name: str) -> Experiment:
    from prefillshare_bench.experiments import EXPERIMENTS, of_file

    path = Path(name)
    if name not in EXPERIMENTS and (path.suffix == ".jsonl" or path.exists()):
        return of_file(path)
    _one_of("EXPERIMENT", [name], EXPERIMENTS)
    return EXPERIMENTS[name]


def _size(name: str) -> Size:
    from prefillshare_bench.experiments import SIZES

    _one_of("--size", [name], SIZES)
    return SIZES[name]


def _one_of(field: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(Problem(field, f"{name!r} is none", f"use {', '.join(known)}"))


@contextmanager
def _progress(
    console: Console, system: str
) -> Iterator[Callable[[Point], Callable[[CallRecord], None]]]:
    """A bar of calls for each point."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("calls"),
        TimeElapsedColumn(),
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
