"""Tables for the terminal. Apart from the values, so that importing the SDK does not load rich."""

from rich.table import Table

from ._records import RoleUsage, SessionUsage


def usage_table(usage: SessionUsage) -> Table:
    table = Table(
        title="Session usage, in tokens",
        title_justify="left",
        caption="saved: what a prefill per role would have computed beyond these",
        caption_justify="left",
    )
    table.add_column("role", overflow="fold")  # cut, two roles may look the same
    for name in ("calls", "prompt", "cached", "computed", "saved", "handed off", "generated"):
        table.add_column(name, justify="right", overflow="fold")
    for role, part in usage.roles.items():
        table.add_row(role, *_cells(part))
    table.add_section()
    table.add_row("all", *_cells(usage), style="bold")
    return table


def _cells(usage: RoleUsage) -> tuple[str, ...]:
    return (
        f"{usage.calls:,}",
        f"{usage.prompt_tokens:,}",
        f"{usage.cached_tokens:,}",
        f"{usage.computed_tokens:,}",
        f"{usage.saved_tokens:,}",
        megabytes(usage.handoff_bytes),
        f"{usage.completion_tokens:,}",
    )


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
