"""``prefillshare roles``: the roles of a cluster that serves, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table

from prefillshare_server.errors import ConfigError, Problem

TIMEOUT_S = 600
"""An adapter may have to be downloaded."""

app = typer.Typer(
    no_args_is_help=True,
    help="""The roles of a running cluster, and the adapters that speak for them.

Changes last until the cluster stops; write them into the cluster file as
well.
""",
)

Url = Annotated[
    str,
    typer.Option(help="The router's address.", envvar="PREFILLSHARE_URL"),
]
Name = Annotated[str, typer.Argument(metavar="ROLE", help="The role's name.")]
DEFAULT_URL = "http://127.0.0.1:8000"


@app.command("list")
def list_roles(url: Url = DEFAULT_URL) -> None:
    """Show each role, its decode workers and what speaks for it."""
    table = Table("role", "workers", "decoder", box=None, pad_edge=False)
    for card in _ask("GET", url, "/v1/roles")["data"]:
        table.add_row(card["id"], card["pool"], card["adapter"] or card["decoder"])
    Console().print(table)


@app.command("set")
def set_role(
    name: Name,
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER", help="A LoRA adapter of the base: folder or hub id.")
    ],
    allow_untrained: Annotated[
        bool, typer.Option(help="Also one that was not trained for this base and layout.")
    ] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Add a role, or give it another adapter. Calls that run keep the one they began with.

    [dim]Example:[/dim]  prefillshare roles set planner ./planner-v2
    """
    # The router may have another working directory.
    given = str(Path(adapter).resolve()) if Path(adapter).exists() else adapter
    body = {"adapter": given, "allow_untrained": allow_untrained}
    card = _ask("PUT", url, f"/v1/roles/{quote(name, safe='')}", body)
    typer.echo(f"{card['id']} answers with {card['adapter']} from its next call on")


@app.command("remove")
def remove_role(name: Name, url: Url = DEFAULT_URL) -> None:
    """Refuse further calls of a role; those that run go on."""
    _ask("DELETE", url, f"/v1/roles/{quote(name, safe='')}")
    typer.echo(f"removed {name}")


def _ask(method: str, url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The router's JSON answer. Raises ConfigError with what it says is wrong."""
    # Not a dependency of the SDK, with which `prefillshare lint` has to work.
    import httpx

    address = url.rstrip("/").removesuffix("/v1") + path
    try:
        answer = httpx.request(method, address, json=body, timeout=TIMEOUT_S)
        found: dict[str, Any] = answer.json()
    except httpx.ReadTimeout:
        raise ConfigError(
            Problem(
                f"{method} {path}",
                f"no answer within {TIMEOUT_S} s",
                "see with `prefillshare roles list` whether it was done",
            )
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(
            Problem(url, f"no router answers there ({error})", "start one, or give its --url")
        ) from None
    if answer.is_error:
        said = found.get("error", {}).get("message") or f"HTTP status {answer.status_code}"
        raise ConfigError(Problem(f"{method} {path}", said, "nothing was changed"))
    return found
