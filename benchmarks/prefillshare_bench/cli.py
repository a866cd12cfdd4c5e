"""``prefillshare bench``: the commands. Heavy parts are imported by those that need them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from prefillshare_bench.choices import Seed, one_of
from prefillshare_bench.report.command import report_command
from prefillshare_bench.run_command import run_command
from prefillshare_server.errors import ConfigError, Problem

if TYPE_CHECKING:
    from prefillshare_bench.traces import Workload

app = typer.Typer(
    no_args_is_help=True,
    help="""The paper's evaluation: its workloads, on real engines, beside its baselines.

Each system is started from nothing with the same number of workers, KV
blocks and cores, and is sent the same sessions. What comes of it is a
folder of files, one per measurement, from which the tables and plots are
made.

[dim]Try:[/dim]  prefillshare bench run attribution
[dim]then[/dim]  prefillshare bench report results
""",
)


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

    [dim]Example:[/dim]  prefillshare bench workload react mine.jsonl --sessions 4
    """
    from prefillshare_bench import workloads

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
    one_of("NAME", [name], built)
    try:
        workload = built[name]()
    except ValueError as error:
        raise ConfigError(Problem(name, str(error), "see --help")) from None
    _told(workload, file)


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
    role_key: Annotated[
        str,
        typer.Option(
            "--role-key",
            metavar="FIELD",
            help="The field that says which agent a request is of, dotted, as metadata.agent.",
        ),
    ] = "model",
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

    Takes the file that PREFILLSHARE_TRACE names and other logs of chat
    requests, a JSON object a line. The requests' models become the roles; what
    they say is sent again as it was. Requests that name no session join the one
    whose messages they go on from.

    [dim]Example:[/dim]  prefillshare bench import trace.jsonl   [dim]then[/dim]
      prefillshare bench run recorded.jsonl --rate 0.1
    """
    from prefillshare_bench import imports

    found = imports.recorded(
        logs,
        name=out.stem,
        session_key=session_key,
        role_key=role_key,
        answer=answer,
        longest_answer=longest_answer,
    )
    _told(found.workload, out)
    if found.joined:
        typer.echo(
            f"{found.joined} of the sessions were told apart by their messages: no field names them"
        )
    if found.skipped:
        typer.echo(f"left out: {found.skipped} lines that are no chat requests")
    if found.rate is not None:
        typer.echo(f"as logged: prefillshare bench run {out} --rate {found.rate:.3g}")


app.command("run")(run_command)
app.command("report")(report_command)


def _told(workload: Workload, file: Path) -> None:
    """Writes the file and says what is in it. Raises ConfigError if it cannot be written."""
    from prefillshare_bench import traces
    from prefillshare_bench.experiments import require_own_name

    require_own_name(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        traces.write(workload, file)
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise ConfigError(Problem(str(file), what, "name a file in a folder of yours")) from None
    longest = workload.longest()
    typer.echo(
        f"{file}: {len(workload.sessions)} sessions, {workload.calls} calls, "
        f"{len(workload.roles)} roles" + ("" if longest is None else f", up to {longest:,} tokens")
    )
