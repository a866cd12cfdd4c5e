"""The figures of a run: a table per call, the sessions' totals, and the same as JSON.

All token and byte counts are the server's: of each call its `prefillshare` object, of each
session `GET /v1/sessions/{id}`. Only times are taken here, at the client.
"""

import re
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.specialists.live import Success
from prefillshare_agents import CallRecord, SessionTotals


@dataclass(frozen=True)
class SessionRun:
    """One finished session."""

    id: str
    calls: tuple[CallRecord, ...]
    totals: SessionTotals

    @property
    def switches(self) -> int:
        return sum(before.role != after.role for before, after in pairwise(self.calls))


def report(runs: Sequence[SessionRun], *, wall_s: float, preemptions: int) -> dict[str, Any]:
    """Return the content of `demo-report.json`."""
    calls = [call for run in runs for call in run.calls]
    workers = [{call.prefill_worker for call in run.calls} for run in runs]
    return {
        "calls": len(calls),
        "model_switches": sum(run.switches for run in runs),
        "sessions": len(runs),
        "prefill_workers_per_session": max(len(used) for used in workers),
        "prompt_tokens": sum(call.prompt_tokens for call in calls),
        "prefill_computed_tokens": sum(call.computed_tokens for call in calls),
        "prefill_cached_tokens": sum(call.cached_tokens for call in calls),
        "per_model_prefill_tokens": sum(run.totals.per_model_prefill_tokens for run in runs),
        "decode_prompt_tokens_computed": sum(call.decode_prompt_tokens_computed for call in calls),
        "handoff_bytes": sum(call.handoff_bytes for call in calls),
        "preemptions": preemptions,
        "wall_s": round(wall_s, 2),
        "per_call": [_per_call(run.id, call) for run in runs for call in run.calls],
    }


def _per_call(session: str, call: CallRecord) -> dict[str, Any]:
    return {
        "session": session,
        "role": call.role,
        "prefill_worker": call.prefill_worker,
        "decode_worker": call.decode_worker,
        "affinity": call.affinity,
        "prompt_tokens": call.prompt_tokens,
        "prefill_computed_tokens": call.computed_tokens,
        "prefill_cached_tokens": call.cached_tokens,
        "decode_prompt_tokens_computed": call.decode_prompt_tokens_computed,
        "handoff_bytes": call.handoff_bytes,
        "decode_tokens": call.completion_tokens,
        "ttft_s": None if call.ttft_s is None else round(call.ttft_s, 3),
        "wall_s": round(call.wall_s, 3),
    }


def preemptions(base_url: str) -> int:
    """Return how many calls the server's decode workers have preempted since it started."""
    url = base_url.rstrip("/").removesuffix("/v1") + "/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    counts = re.findall(r"^prefillshare_decode_preemptions_total\S* (\S+)$", text, re.MULTILINE)
    return int(sum(map(float, counts)))


def success_rates(found: Mapping[str, Success]) -> dict[str, dict[str, Any]]:
    """Return what `demo-report.json` says of the specialists: rates in percent."""
    return {
        role: {
            "n": each.n,
            "base": None if each.base is None else round(100 * each.base / each.n, 1),
            "specialist": round(100 * each.specialist / each.n, 1),
        }
        for role, each in found.items()
    }


def print_specialists(console: Console, rates: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(
        title="Each role's job, on items that it was not trained on",
        title_justify="left",
        caption="Free answers, both decoders on the same KV; judged by examples/specialists",
        caption_justify="left",
    )
    table.add_column("role")
    for name in ("items", "base", "specialist"):
        table.add_column(name, justify="right")
    for role, rate in rates.items():
        base = "" if rate["base"] is None else f"{rate['base']:.0f} %"
        table.add_row(role, str(rate["n"]), base, f"{rate['specialist']:.0f} %")
    console.print(table)


def print_tables(console: Console, runs: Sequence[SessionRun], figures: dict[str, Any]) -> None:
    for number, run in enumerate(runs, 1):
        console.print(_calls_table(f"Session {number}", run))
    console.print(_totals_table(figures))
    computed = figures["prefill_computed_tokens"]
    alone = figures["per_model_prefill_tokens"]
    console.print(
        f"The shared prefill computed [bold]{computed:,}[/] prompt tokens. One prefill per model, "
        f"each with its own prefix cache, would have computed [bold]{alone:,}[/]"
        + (f": {alone / computed:.1f} times as many." if computed else ".")
    )


def _calls_table(title: str, run: SessionRun) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        caption=f"One prefill per model: {run.totals.per_model_prefill_tokens:,} tokens computed",
        caption_justify="left",
    )
    table.add_column("role")
    for name in ("prompt", "computed", "cached", "handed off", "TTFT", "decoded"):
        table.add_column(name, justify="right")
    for call in run.calls:
        table.add_row(
            call.role,
            f"{call.prompt_tokens:,}",
            f"{call.computed_tokens:,}",
            f"{call.cached_tokens:,}",
            f"{call.handoff_bytes / 1e6:.1f} MB",
            "" if call.ttft_s is None else f"{call.ttft_s:.2f} s",
            f"{call.completion_tokens:,}",
        )
    totals = run.totals
    table.add_section()
    table.add_row(
        "session",
        f"{totals.prompt_tokens:,}",
        f"{totals.computed_tokens:,}",
        f"{totals.cached_tokens:,}",
        f"{totals.handoff_bytes / 1e6:.1f} MB",
        "",
        f"{totals.generated_tokens:,}",
        style="bold",
    )
    return table


def _totals_table(figures: dict[str, Any]) -> Table:
    table = Table(title="All sessions", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, key in [
        ("model calls", "calls"),
        ("model switches", "model_switches"),
        ("prompt tokens", "prompt_tokens"),
        ("… computed by the shared prefill", "prefill_computed_tokens"),
        ("… found in its cache", "prefill_cached_tokens"),
        ("… computed by decode workers (the last of each prompt)", "decode_prompt_tokens_computed"),
        ("one prefill per model would have computed", "per_model_prefill_tokens"),
        ("calls preempted", "preemptions"),
    ]:
        table.add_row(name, f"{figures[key]:,}")
    table.add_row("KV handed off", f"{figures['handoff_bytes'] / 1e6:,.1f} MB")
    table.add_row("wall time", f"{figures['wall_s']:.1f} s")
    return table
