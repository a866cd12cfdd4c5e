"""Compares four ways to serve LoRA specialists: `python -m benchmarks.lora_modes --help`."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.accuracy import results
from benchmarks.lora_modes.load import answering, prefilled_by, run_sessions, tokens
from benchmarks.lora_modes.systems import LABELS, SYSTEMS, Running, Setting
from prefillshare_bench import adapters

SCALES = (1, 2, 4, 8)
SESSIONS = (1, 4, 16)
NAME = "lora_modes"

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def main(
    base: Annotated[str, typer.Option(help="The base.")] = "smollm2-135m-instruct",
    system: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(LABELS)}; may be repeated.")
    ] = None,
    roles: Annotated[int, typer.Option(help=f"In the sessions: one of {SCALES}.")] = 4,
    sessions: Annotated[
        list[int] | None,
        typer.Option(help="At once; may be repeated.", show_default=", ".join(map(str, SESSIONS))),
    ] = None,
    calls: Annotated[int, typer.Option(help="Of each session.", min=2)] = 8,
    start: Annotated[int, typer.Option(help="Tokens of a session's first context.")] = 1024,
    end: Annotated[int, typer.Option(help="Tokens of its last.")] = 4096,
    blocks: Annotated[int, typer.Option(help="KV blocks of 32 tokens, over all workers.")] = 5120,
    folder: Annotated[Path, typer.Option(help="Where the figures go.")] = results.FOLDER,
) -> None:
    """Serve the same roles in every way, send the same calls, and print the figures side by side.

    Some 50 minutes on two cores. Each system is started from nothing, alone on
    the machine.
    """
    if roles not in SCALES:
        raise typer.BadParameter(f"{roles} is none of {SCALES}", param_hint="--roles")
    console = Console(stderr=True)
    names = [f"role{number}" for number in range(max(SCALES))]
    path = folder / f"{NAME}.json"
    with tempfile.TemporaryDirectory(prefix="lora-modes-") as scratch:
        work = Path(scratch)
        setting = Setting(base, adapters.draw(base, work / "adapters", names), blocks)
        four = Setting(base, {name: setting.adapters[name] for name in names[:roles]}, blocks)
        for name, begin in SYSTEMS.items():
            if system and name not in system:
                continue
            console.print(f"[bold]{LABELS[name]}[/]")
            found: dict[str, Any] = {}
            with begin(four, work) as running:
                found = _measure(running, names[:roles], sessions or SESSIONS, calls, start, end)
            console.print(found)
            found["roles_scaling"] = {}
            for scale in SCALES:
                some = Setting(base, {n: setting.adapters[n] for n in names[:scale]}, blocks)
                with begin(some, work) as running:
                    found["roles_scaling"][str(scale)] = _scaling(running, names[:scale], end)
                console.print(f"{scale} roles: {found['roles_scaling'][str(scale)]}")
            found["kv_blocks"] = found["roles_scaling"][str(roles)]["kv_blocks"]
            figures = results.read(path)
            figures[name] = found
            figures["about"] = {
                "labels": LABELS,
                "base": base,
                "machine": f"{os.cpu_count()} cores, {platform.machine()}",
                "calls": f"{calls} per session, {roles} roles in turn, {start} to {end} tokens",
                "sessions_at_once_of_the_first_figures": _middle(sessions or SESSIONS),
                "kv_blocks_of_a_system": blocks,
                "command": results.command(),
            }
            results.write(figures, path)
    _print(results.read(path))


def _middle(sessions: Sequence[int]) -> int:
    return sessions[len(sessions) // 2]


def _measure(
    running: Running, roles: list[str], sessions: Sequence[int], calls: int, start: int, end: int
) -> dict[str, Any]:
    loads = {}
    for count in sessions:
        loads[str(count)] = asdict(
            run_sessions(
                running.url,
                roles,
                sessions=count,
                calls=calls,
                start=start,
                end=end,
                name=f"at-once-{count}",
            )
        )
    return {
        **loads[str(_middle(sessions))],
        "rss_mb": round(running.rss_mb()),
        "ready_s": round(running.ready_s, 1),
        "sessions_at_once": loads,
    }


def _scaling(running: Running, roles: list[str], length: int) -> dict[str, int]:
    context = tokens(length, "scaling")
    prefilled = prefilled_by(running.url, roles, context, "scaling")
    with answering(running.url, roles, context, "scaling"):
        return {"kv_blocks": running.blocks_in_use(), "prefilled_tokens": prefilled}


def _print(figures: dict[str, Any]) -> None:
    shown = ("ttft_switch_ms", "throughput_tok_s", "prefilled_tokens", "kv_blocks", "rss_mb")
    table = Table("", *shown, "ready_s")
    for name, label in LABELS.items():
        if name in figures:
            table.add_row(label, *(str(figures[name][key]) for key in (*shown, "ready_s")))
    Console().print(table)
    if "stock" not in figures:
        return
    ratios = Table(
        "stock vLLM / system", "sessions", "TTFT", "prefilled", "system / stock: tokens/s"
    )
    for name, label in LABELS.items():
        for sessions, stock in figures["stock"]["sessions_at_once"].items():
            if name == "stock" or sessions not in figures.get(name, {}).get("sessions_at_once", {}):
                continue
            ours = figures[name]["sessions_at_once"][sessions]
            ratios.add_row(
                label,
                sessions,
                f"{stock['ttft_switch_ms'] / ours['ttft_switch_ms']:.1f}",
                f"{stock['prefilled_tokens'] / ours['prefilled_tokens']:.1f}",
                f"{ours['throughput_tok_s'] / stock['throughput_tok_s']:.1f}",
            )
    Console().print(ratios)


if __name__ == "__main__":
    results.run(app)
