"""Measures what the SDK promises: `python -m benchmarks.sdk` writes docs/results/sdk.json."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from langgraph.graph import START, MessagesState, StateGraph
from rich.console import Console

from benchmarks.accuracy import results
from prefillshare_agents import CallRecord
from prefillshare_agents.langgraph import Team
from prefillshare_bench.processes import serving
from prefillshare_server.config import Cluster

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = ROOT / "examples" / "react" / "cluster.yaml"
NAME = "sdk"

ROLES = {
    "planner": "Plan the next step in one sentence.",
    "toolcaller": "Call the tool that helps most, or say that none does.",
    "solver": "Answer the question from what is known.",
    "critic": "Say what is wrong with the last answer.",
}
CONTEXT_WORDS = 3900
ROOM = {"max_model_len": 8192, "kv.blocks": 512}
IMPORTS = 7

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def main(
    folder: Annotated[Path, typer.Option(help="Where the figures go.")] = results.FOLDER,
) -> None:
    """Run LangChain's standard suite, four agents with and without the layout, and the import.

    Some four minutes on two cores. The agents run on real engines: once as the
    cluster of examples/react serves them, and once with
    `layout: {kind: model}`, as ordinary servers render.
    """
    console = Console(stderr=True)
    console.print("[bold]LangChain's standard suite[/]")
    figures: dict[str, Any] = standard_suite()
    for name, layout in (("shared_ratio", None), ("control_ratio", "model")):
        console.print(f"[bold]four agents, {name}[/]")
        figures[name], figures[f"{name}_calls"] = agents(layout)
    figures["import_s"] = import_s("from prefillshare_agents import OpenAI, Session")
    figures["openai_import_s"] = import_s("import openai")
    figures["about"] = {
        "shared_ratio": "cached / prompt tokens of the second to fourth agent, by the server",
        "control_ratio": "the same graph and server with the model's own layout",
        "import_s": f"OpenAI and Session, openai included; a fresh process, best of {IMPORTS}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {sys.version.split()[0]}",
        "command": results.command(),
    }
    results.write(figures, folder / f"{NAME}.json")
    Console().print_json(data=figures)


def standard_suite() -> dict[str, int]:
    """How many of its tests passed, failed, and were skipped or are expected to fail."""
    with tempfile.TemporaryDirectory(prefix="sdk-") as scratch:
        report = Path(scratch) / "report.json"
        environment = {**os.environ, "PREFILLSHARE_STANDARD_COUNTS": str(report)}
        command = [sys.executable, "-m", "pytest", "-q", "-m", "langchain_standard"]
        subprocess.run(
            [*command, "tests/langchain_standard"], cwd=ROOT, env=environment, check=False
        )
        found: dict[str, int] = json.loads(report.read_text())
    return {name: found[name] for name in sorted(found)}


def agents(layout: str | None) -> tuple[float, list[dict[str, int | str]]]:
    """The cached part of the prompts of all agents but the first, and each call's counts."""
    # The adapters were trained for the other layout; only counts are looked at here.
    changes = {"layout.kind": layout, "allow_untrained": True} if layout else {}
    cluster = Cluster.load(CLUSTER, {**ROOM, **changes})
    with (
        tempfile.TemporaryDirectory(prefix="sdk-") as scratch,
        serving(cluster, Path(scratch) / "cluster.yaml") as (url, _, _),
    ):
        calls = run_agents(f"{url}/v1")
    later = calls[1:]
    ratio = sum(call.cached_tokens for call in later) / sum(call.prompt_tokens for call in later)
    rows: list[dict[str, int | str]] = [
        {name: getattr(call, name) for name in ("role", "prompt_tokens", "cached_tokens")}
        for call in calls
    ]
    return round(ratio, 4), rows


def run_agents(base_url: str) -> tuple[CallRecord, ...]:
    """Four agents, each with instructions and a tool of its own, one after the other."""
    team = Team(base_url, list(ROLES))
    graph = StateGraph(MessagesState)
    before = START
    for role, instructions in ROLES.items():
        model = team.model(role, max_tokens=16, temperature=0)
        agent = team.agent(role, instructions=instructions, tools=[_tool(role)], model=model)
        graph.add_node(role, agent)
        graph.add_edge(before, role)
        before = role
    words = " ".join(f"line {number}: the hut stands at" for number in range(CONTEXT_WORDS // 6))
    task: Any = {"messages": [("user", f"{words} What is this?")]}
    with team.session() as session:
        graph.compile().invoke(task)
    session.close()
    team.close()
    return session.calls


def _tool(role: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": f"note_{role}",
            "description": f"Keep a note of the {role}.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}},
                "required": ["text"],
            },
        },
    }


def import_s(line: str) -> float:
    """Seconds of an import in a fresh process, without the start of the interpreter."""
    program = f"import time; t = time.perf_counter(); {line}; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", program]
    times = [
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(IMPORTS)
    ]
    return round(min(times), 3)


if __name__ == "__main__":
    app()
