"""`python -m examples.reflexion`: answer by trial, judgement and reflection."""

from pathlib import Path

import typer
from rich.console import Console

from examples.reflexion.graph import ROLES, build
from examples.running import URL, BaseUrl, Questions, Task, check_server, read, run
from prefillshare_agents import Session
from prefillshare_agents.langgraph import Team

QUESTIONS = Path(__file__).with_name("questions.jsonl")


def main(
    base_url: BaseUrl = URL, questions: Questions = QUESTIONS, task: Task = None
) -> list[Session]:
    """Try to answer each question until the evaluator accepts; show what it cost."""
    check_server(base_url, ROLES)
    team, console = Team(base_url, ROLES), Console(highlight=False)
    sessions = [run(build(team), team, turns, console) for turns in read(questions, task)]
    team.close()
    return sessions


if __name__ == "__main__":
    typer.run(main)
