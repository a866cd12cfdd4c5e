"""`python -m examples.react`: run the ReAct graph on a served cluster and report its figures."""

import json
import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from langchain_core.messages import AIMessageChunk, ToolMessage
from rich.console import Console

from examples.react.graph import build
from examples.react.report import (
    SessionRun,
    preemptions,
    print_specialists,
    print_tables,
    report,
    success_rates,
)
from examples.react.roles import ROLES
from examples.specialists.live import measure
from prefillshare_agents.langgraph import Team

QUESTIONS = Path(__file__).with_name("questions.jsonl")
STYLES = dict(zip(ROLES, ("cyan", "yellow", "green", "magenta"), strict=True))


def main(
    base_url: Annotated[
        str, typer.Option(help="The router's address.")
    ] = "http://127.0.0.1:8000/v1",
    questions: Annotated[
        Path, typer.Option(help="JSON lines with a `question` each.", exists=True, dir_okay=False)
    ] = QUESTIONS,
    report_file: Annotated[
        Path | None, typer.Option("--report", help="Where to write the figures as JSON.")
    ] = None,
    held_out: Annotated[
        int, typer.Option(min=0, help="Held-out items per role to compare with the base; 0: none.")
    ] = 10,
) -> None:
    """Answer each question in a session of its own and show what every model call cost.

    Then give each role held-out items of its job, and the base the same ones.
    """
    console = Console(highlight=False)
    console.print("Four specialists, one prefill worker's KV.")
    try:
        preempted_before = preemptions(base_url)
    except OSError as error:
        raise typer.BadParameter(
            f"no server answers at {base_url} ({error}); "
            "start one with: prefillshare serve examples/react/cluster.yaml"
        ) from error
    team = Team(base_url, ROLES)
    graph = build(team)
    started = time.perf_counter()
    runs = [answer(console, team, graph, question) for question in read(questions)]
    figures = report(
        runs,
        wall_s=time.perf_counter() - started,
        preemptions=preemptions(base_url) - preempted_before,
    )
    team.close()
    console.print()
    print_tables(console, runs, figures)
    if held_out:
        figures["specialists"] = success_rates(measure(base_url, held_out))
        print_specialists(console, figures["specialists"])
    if report_file is not None:
        report_file.write_text(json.dumps(figures, indent=2) + "\n")


def read(path: Path) -> list[str]:
    """Return the questions of a JSON lines file. Exits with a message if there are none."""
    try:
        found = [json.loads(line)["question"] for line in path.read_text().splitlines() if line]
    except (ValueError, KeyError, TypeError) as error:
        raise typer.BadParameter(
            f"{path}: each line needs a JSON object with `question`"
        ) from error
    if not found:
        raise typer.BadParameter(f"{path} has no question")
    return found


def answer(console: Console, team: Team, graph: Any, question: str) -> SessionRun:
    """Run the graph on one question in a new session, printing each step as it streams."""
    console.print(f"\n[bold]{question}[/]")
    speaking = None
    with team.session() as session:
        # Unlike in any earlier run: its KV may still be cached and would flatter the figures.
        task = f"Task {session.id[:8]}. {question}"
        steps = graph.stream({"messages": [("user", task)]}, stream_mode="messages")
        for message, step in steps:
            if isinstance(message, ToolMessage):
                console.print(f"\n{'→':>10}  {message.text}", style="dim", end="")
            elif isinstance(message, AIMessageChunk):
                if speaking != message.id:
                    role, speaking = step["langgraph_node"], message.id
                    console.print(f"\n[{STYLES[role]}]{role:>10}[/]  ", end="")
                console.print(text_of(message), end="", markup=False)
    console.print()
    run = SessionRun(session.id, session.calls, session.totals())
    session.close()
    return run


def text_of(chunk: AIMessageChunk) -> str:
    """Return what a chunk adds to the answer, on one line: text, or a piece of a tool call."""
    calls = (f"{call['name'] or ''}{call['args'] or ''}" for call in chunk.tool_call_chunks)
    return re.sub(r"\s+", " ", chunk.text + "".join(calls))


if __name__ == "__main__":
    typer.run(main)
