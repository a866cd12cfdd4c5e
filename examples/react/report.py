"""The figures of a run over all its sessions, printed and as JSON.

All token and byte counts are the server's, of each call its `prefillshare` object. Only times are
taken here, at the client.
"""

import re
import urllib.request
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.running import print_usage
from examples.specialists.live import Success
from prefillshare_agents import CallRecord, Session, SessionUsage


def report(sessions: Sequence[Session], *, wall_s: float, preemptions: int) -> dict[str, Any]:
    """Return the content of `demo-report.json`."""
    usage = usage_of(sessions)
    calls = [call for session in sessions for call in session.calls]
    workers = [{call.prefill_worker for call in session.calls} for session in sessions]
    return {
        "calls": usage.calls,
        "model_switches": sum(switches(session) for session in sessions),
        "sessions": len(sessions),
        "prefill_workers_per_session": max(len(used) for used in workers),
        "prompt_tokens": usage.prompt_tokens,
        "prefill_computed_tokens": usage.computed_tokens,
        "prefill_cached_tokens": usage.cached_tokens,
        "per_model_prefill_tokens": usage.per_model_prefill_tokens,
        "decode_prompt_tokens_computed": sum(call.decode_prompt_tokens_computed for call in calls),
        "handoff_bytes": usage.handoff_bytes,
        "preemptions": preemptions,
        "wall_s": round(wall_s, 2),
        "per_call": [_per_call(each.id, call) for each in sessions for call in each.calls],
    }


def usage_of(sessions: Sequence[Session]) -> SessionUsage:
    return SessionUsage.of(call for session in sessions for call in session.calls)


def switches(session: Session) -> int:
    """Return how many calls of a session went to another model than the call before."""
    return sum(before.role != after.role for before, after in pairwise(session.calls))


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


def print_all(console: Console, sessions: Sequence[Session], figures: Mapping[str, Any]) -> None:
    """Print what several sessions cost together, in the table of one; and who read what."""
    if len(sessions) > 1:
        console.print(f"\n[bold]All {len(sessions)} sessions[/]")
        print_usage(console, usage_of(sessions))
    console.print(
        f"{figures['model_switches']} of {figures['calls']} calls went to another model than the "
        f"call before.\nDecode workers computed {figures['decode_prompt_tokens_computed']} prompt "
        "tokens, the last one of each prompt."
    )
