"""`python -m examples.react`: run the ReAct graph on a served cluster and show what it cost."""

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
    preemptions,
    print_all,
    print_specialists,
    report,
    success_rates,
)
from examples.react.roles import ROLES
from examples.running import URL, BaseUrl, Questions, Task, check_server, print_usage, read
from examples.specialists.live import measure
from prefillshare_agents import Session
from prefillshare_agents.langgraph import Team

QUESTIONS = Path(__file__).with_name("questions.jsonl")
STYLES = dict(zip(ROLES, ("cyan", "yellow", "green", "magenta"), strict=True))


def main(
    base_url: BaseUrl = URL,
    questions: Questions = QUESTIONS,
    task: Task = None,
    report_file: Annotated[
        Path | None, typer.Option("--report", help="Where to write the figures as JSON.")
    ] = None,
    held_out: Annotated[
        int, typer.Option(min=0, help="Held-out items per role to compare with the base.")
    ] = 0,
) -> list[Session]:
    """Answer each question in a session of its own; show what it cost.

    With --held-out, then give each role items of its job, and the base the same ones.
    """
    check_server(base_url, ROLES)
    team, console = Team(base_url, ROLES), Console(highlight=False)
    graph = build(team)
    preempted_before = preemptions(base_url)
    started = time.perf_counter()
    sessions = [answer(console, team, graph, turns[0]) for turns in read(questions, task)]
    figures = report(
        sessions,
        wall_s=time.perf_counter() - started,
        preemptions=preemptions(base_url) - preempted_before,
    )
    team.close()
    print_all(console, sessions, figures)
    if held_out:
        figures["specialists"] = success_rates(measure(base_url, held_out))
        print_specialists(console, figures["specialists"])
    if report_file is not None:
        report_file.write_text(json.dumps(figures, indent=2) + "\n")
    return sessions


def answer(console: Console, team: Team, graph: Any, question: str) -> Session:
    """Run the graph on one question in a new session, printing each step as it streams."""
    console.print(f"\n[bold]{question}[/]")
    speaking = None
    with team.session() as session:
        steps = graph.stream({"messages": [("user", question)]}, stream_mode="messages")
        for message, step in steps:
            if isinstance(message, ToolMessage):
                console.print(f"\n{message.name:>10}  {message.text}", style="dim", end="")
            elif isinstance(message, AIMessageChunk):
                if speaking != message.id:
                    role, speaking = step["langgraph_node"], message.id
                    console.print(f"\n[{STYLES[role]}]{role:>10}[/]  ", end="")
                console.print(text_of(message), end="", markup=False)
    console.print()
    session.close()
    print_usage(console, session.usage)
    return session


def text_of(chunk: AIMessageChunk) -> str:
    """Return what a chunk adds to the answer, on one line: text, or a piece of a tool call."""
    calls = (f"{call['name'] or ''}{call['args'] or ''}" for call in chunk.tool_call_chunks)
    return re.sub(r"\s+", " ", chunk.text + "".join(calls))


if __name__ == "__main__":
    typer.run(main)
