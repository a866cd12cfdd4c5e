"""`python -m examples.supervisor`: a supervisor hands work to three specialists."""

from pathlib import Path

import typer
from rich.console import Console

from examples.running import URL, BaseUrl, Questions, Task, check_server, read, run
from examples.supervisor.graph import ROLES, build
from prefillshare_agents import Session
from prefillshare_agents.langgraph import Team

QUESTIONS = Path(__file__).with_name("questions.jsonl")


def main(
    base_url: BaseUrl = URL, questions: Questions = QUESTIONS, task: Task = None
) -> list[Session]:
    """Let a supervisor's specialists answer each question; show what it cost."""
    check_server(base_url, ROLES)
    team, console = Team(base_url, ROLES), Console(highlight=False)
    sessions = [run(build(team), team, turns, console) for turns in read(questions, task)]
    team.close()
    return sessions


if __name__ == "__main__":
    typer.run(main)
