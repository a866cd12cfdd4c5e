"""Soak: a cluster under load whose workers are killed all the time, for as long as you like.

`python -m benchmarks.soak --help`
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from benchmarks.soak_cluster import ROLES, SoakCluster
from prefillshare_server.models import store
from tests.engine_faults.calls import Answer, CallFailedError, CutShortError, Kind, call
from tests.engine_faults.exactness import Reference
from tests.engine_faults.histories import Call, History

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "soak.json"
ANSWER_S = 180
MOST_TOKENS = 150
"""Long answers, so that most kills hit some."""

REST_S = 30
RETRIES = 5
WARM_UP_SHARE = 0.1
SAMPLE_S = 2.0
RETRYABLE = (503, 504)
"""With these the router says that the same call may succeed later. What it says inside a stream
carries no status, so there the code has to be one of those below."""
RETRYABLE_CODES = frozenset(
    {
        "no_worker",
        "worker_unreachable",
        "queue_timeout",
        "prefill_timeout",
        "first_token_timeout",
        "idle_stream_timeout",
        "decode_preempted",
        "kv_load_failed",
        "handoff_timeout",
        "lease_expired",
    }
)

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@dataclass
class Tally:
    """What has happened so far."""

    answers: int = 0
    tokens: int = 0
    resumed: int = 0
    """Answers' interruptions that the router made good."""
    errors: Counter[str] = field(default_factory=Counter)
    """Calls that ended in an error, by code, also where a retry helped."""
    lost: list[str] = field(default_factory=list)
    corrupted: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    rss_mb: list[float] = field(default_factory=list)
    left: int = 0
    """Calls and reserved KV blocks that the router counts at the end."""


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(help="How long.", min=0.1)] = 30,
    kill_every: Annotated[
        float, typer.Option(help="Seconds between two kills; 0 kills nobody.", min=0)
    ] = 20,
    sessions: Annotated[int, typer.Option(help="Sessions at a time.", min=1)] = 6,
    distinct: Annotated[
        int, typer.Option(help="Different sessions; after so many they repeat.", min=1)
    ] = 300,
    seed: Annotated[int, typer.Option(help="Draws sessions and victims.")] = 1,
    results: Annotated[
        Path,
        typer.Option(
            help="Where the figures go, as JSON.",
            show_default="docs/results/soak.json of the checkout",
        ),
    ] = RESULTS,
) -> None:
    """Kill a worker every few seconds while many sessions talk, and check every token.

    Starts [bold]prefillshare serve[/bold] with tiny models: two prefill workers, two
    replicas of each of two roles. Sessions of several turns switch roles,
    stream or not, some held to a JSON schema or a tool. SIGKILL ends all
    processes of a worker at once; the server starts it again.

    Every answer is compared, token by token, with plain Hugging Face models in
    this process.

    [bold]lost[/bold]: a call without an answer after the client's retries; a stream that ended
    silently or too early; an error that is not a 503 or 504.

    [bold]corrupted[/bold]: an answer with a token that the reference would not have chosen.

    [bold]errors[/bold]: calls that ended in an error, whether a retry cured it or not.

    [bold]rss_growth_mb[/bold]: of the process with the router, workers not counted, from the
    end of the warm-up (a tenth of the time) to the end. Sessions repeat, so
    that by then the tokenizer's cache, which keeps 10,000 texts, holds all of
    them; what still grows is a leak.

    [bold]left_in_hand[/bold]: calls and reserved KV blocks that the router counts at the end.

    Exit code 1 if anything was lost, corrupted or left.

    [dim]Examples:[/dim]

      python -m benchmarks.soak

      python -m benchmarks.soak --minutes 2 --kill-every 15 --results soak.json
    """
    console = Console()
    tally = asyncio.run(_run(console, minutes * 60, kill_every, sessions, distinct, seed))
    figures = _figures(
        tally,
        minutes=minutes,
        kill_every_s=kill_every,
        sessions=sessions,
        distinct=distinct,
        seed=seed,
    )
    _print(console, figures, tally)
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"written to {results}")
    sys.exit(1 if tally.lost or tally.corrupted or tally.left else 0)


async def _run(
    console: Console,
    seconds: float,
    kill_every: float,
    sessions: int,
    distinct: int,
    seed: int,
) -> Tally:
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        cluster = SoakCluster(Path(folder))
        try:
            with console.status("starting the workers"):
                reference = await asyncio.to_thread(_reference)
                await cluster.started()
            end = time.monotonic() + seconds

            def draw(number: int) -> History:
                return History.draw(
                    seed * 1_000_000 + number % distinct, list(ROLES), most_tokens=MOST_TOKENS
                )

            async with asyncio.TaskGroup() as group:
                killing = group.create_task(_kill(cluster, tally, kill_every, seed))
                watching = group.create_task(_watch(cluster, tally, console, seconds))
                talks = [
                    _talk(cluster, reference, tally, end, range(first, 1_000_000, sessions), draw)
                    for first in range(sessions)
                ]
                await asyncio.gather(*talks)
                killing.cancel()
                watching.cancel()
            tally.left = await _left(cluster.url)
        finally:
            await cluster.stop()
    return tally


def _reference() -> Reference:
    """With every model loaded."""
    disable_progress_bar()
    base, roles = store.resolve("tiny-base"), {r: store.resolve(m) for r, m in ROLES.items()}
    reference = Reference(base, roles)
    for role in roles:
        reference.first_wrong(role, [1, 2], [3])
    return reference


async def _left(url: str) -> int:
    """Calls and KV blocks that the router still counts once every call has ended."""
    left, deadline = 1, time.monotonic() + REST_S
    async with aiohttp.ClientSession() as http:
        while left and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
            async with http.get(f"{url}/v1/workers") as response:
                workers = (await response.json())["data"]
            left = sum(each["in_flight"] + each["reserved_blocks"] for each in workers)
    return left


async def _kill(cluster: SoakCluster, tally: Tally, every_s: float, seed: int) -> None:
    chance = random.Random(seed)
    while every_s:
        await asyncio.sleep(every_s)
        tally.kills[cluster.kill_one(chance)] += 1


async def _watch(cluster: SoakCluster, tally: Tally, console: Console, seconds: float) -> None:
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task, began = progress.add_task("", total=seconds), time.monotonic()
        while True:
            cluster.require_running()
            tally.rss_mb.append(cluster.router_rss_mb())
            progress.update(
                task,
                completed=time.monotonic() - began,
                description=f"{tally.answers} answers, {tally.kills.total()} kills, "
                f"{tally.resumed} resumed, {tally.errors.total()} errors, {len(tally.lost)} lost, "
                f"{len(tally.corrupted)} corrupted, {tally.rss_mb[-1]:.0f} MB",
            )
            await asyncio.sleep(SAMPLE_S)


async def _talk(
    cluster: SoakCluster,
    reference: Reference,
    tally: Tally,
    end: float,
    numbers: Iterable[int],
    draw: Callable[[int], History],
) -> None:
    """One session after another until the time is over."""
    # A connection per call, as if every one came from another client.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        for number in numbers:
            if time.monotonic() > end:
                return
            session = f"soak-{number}"
            send = partial(_answer, http, cluster.url, session, tally)
            try:
                async for made in draw(number).run(send):
                    await asyncio.to_thread(_check, reference, made, session, tally)
            except _LostError as lost:
                tally.lost.append(str(lost))
            async with http.delete(f"{cluster.url}/v1/sessions/{session}"):
                pass


class _LostError(Exception):
    """A session cannot go on."""


async def _answer(
    http: aiohttp.ClientSession,
    url: str,
    session: str,
    tally: Tally,
    kind: Kind,
    body: Mapping[str, Any],
) -> Answer:
    """The answer, after retries where the error says that they help."""
    for attempt in range(RETRIES):
        try:
            answer = await call(http, url, kind, body, session)
        except CallFailedError as error:
            tally.errors[error.code or str(error.status)] += 1
            if error.status not in RETRYABLE and error.code not in RETRYABLE_CODES:
                raise _LostError(f"{session}: {error}") from error
            await asyncio.sleep(2**attempt * random.uniform(0.2, 0.5))
        except (CutShortError, TimeoutError) as error:
            raise _LostError(f"{session}: {error!r}") from error
        else:
            return answer
    raise _LostError(f"{session}: no answer after {RETRIES} attempts")


def _check(reference: Reference, made: Call, session: str, tally: Tally) -> None:
    answer, role = made.answer, made.step.role
    tally.answers += 1
    tally.tokens += len(answer.token_ids)
    tally.resumed += answer.report["resumed"]
    name = f"{session}, {role}, resumed {answer.report['resumed']} times"
    if answer.finish_reason is None or (
        answer.finish_reason == "length" and len(answer.token_ids) != made.body["max_tokens"]
    ):
        tally.lost.append(f"{name}: {len(answer.token_ids)} tokens, {answer.finish_reason}")
    at = reference.first_wrong(role, answer.prompt_ids, answer.token_ids, made.grammar)
    if at is not None:
        tally.corrupted.append(f"{name}: token {at} of {answer.token_ids}")
    elif answer.usage["completion_tokens"] != len(answer.token_ids):
        tally.corrupted.append(f"{name}: usage {answer.usage}, {len(answer.token_ids)} tokens")


def _figures(tally: Tally, minutes: float, **settings: float) -> dict[str, Any]:
    warm = tally.rss_mb[int(len(tally.rss_mb) * WARM_UP_SHARE) :]
    tenth = max(1, len(warm) // 10)
    growth = _mean(warm[-tenth:]) - _mean(warm[:tenth])
    return {
        "minutes": minutes,
        "kills": tally.kills.total(),
        "answers": tally.answers,
        "lost": len(tally.lost),
        "corrupted": len(tally.corrupted),
        "rss_growth_mb": round(growth, 1),
        "rss_mb": round(_mean(warm[-tenth:]), 1),
        "left_in_hand": tally.left,
        "tokens": tally.tokens,
        "resumed": tally.resumed,
        "errors": dict(tally.errors),
        "kills_by_worker": dict(sorted(tally.kills.items())),
        **settings,
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _print(console: Console, figures: Mapping[str, Any], tally: Tally) -> None:
    table = Table("figure", "value", title="soak")
    for name, value in figures.items():
        table.add_row(name, str(value))
    console.print(table)
    for kind, found in (("lost", tally.lost), ("corrupted", tally.corrupted)):
        for each in found[:20]:
            console.print(f"{kind}: {each}", style="red", markup=False, highlight=False)


if __name__ == "__main__":
    app()
