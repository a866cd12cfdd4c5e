"""`python -m examples.tutorial_graph`: the same graph before and after three changed lines."""

import uuid
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from examples.running import URL, BaseUrl, Questions, Task, check_server, read, run, show
from examples.tutorial_graph import after, before
from prefillshare_agents import Session
from prefillshare_agents.langgraph import Team

ROLES = ("planner", "solver", "critic")
QUESTIONS = Path(__file__).with_name("questions.jsonl")


def main(
    base_url: BaseUrl = URL, questions: Questions = QUESTIONS, task: Task = None
) -> list[Session]:
    """Answer each question with both versions of the graph; show what each call shared."""
    check_server(base_url, ROLES)
    team, console = Team(base_url, ROLES), Console(highlight=False)
    sessions = []
    for turns in read(questions, task):
        console.print("\n[bold]before.py[/]")
        cached, prompt = run_before(console, base_url, turns[0])
        console.print(f"\n{cached:,} of {prompt:,} prompt tokens were cached.")
        console.print("\n[bold]after.py[/]")
        sessions.append(run(after.build(base_url), team, turns, console))
    team.close()
    return sessions


def run_before(console: Console, base_url: str, question: str) -> tuple[int, int]:
    """Run the graph as it was; return its cached prompt tokens, and all of them."""
    console.print(f"\n[bold]{question}[/]\n")
    config: Any = {"configurable": {"thread_id": uuid.uuid4().hex}}
    asked = {"messages": [("user", question)]}
    graph = before.build(base_url)
    for update in graph.stream(asked, config, stream_mode="updates"):
        show(console, update, set())
    answers = [item for item in graph.get_state(config).values["messages"] if item.type == "ai"]
    usage = [answer.usage_metadata for answer in answers]
    cached = sum(item["input_token_details"]["cache_read"] for item in usage)
    return cached, sum(item["input_tokens"] for item in usage)


if __name__ == "__main__":
    typer.run(main)
