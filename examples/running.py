"""What every example's command does: read questions, run a graph in a session, print its table."""

import json
import random
import textwrap
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from langchain_core.messages import AIMessage, BaseMessage
from rich.console import Console

from prefillshare_agents import Session, SessionUsage
from prefillshare_agents.langgraph import Team

URL = "http://127.0.0.1:8000/v1"
BaseUrl = Annotated[str, typer.Option(help="The router's address.", envvar="OPENAI_BASE_URL")]
Questions = Annotated[
    Path, typer.Option(help="JSON lines with a `question` each.", exists=True, dir_okay=False)
]
Task = Annotated[
    int | None,
    typer.Option(
        help="Number in front of the first question. Left out, one that no run had before: "
        "KV of an earlier run may still be cached, and would flatter the figures."
    ),
]


def read(path: Path, task: int | None) -> list[list[str]]:
    """Return what the user says in each conversation of a JSON lines file: `question`, `then`.

    Each begins with a number of eight digits. Exits with a message if the file has none.
    """
    try:
        found = [json.loads(line) for line in path.read_text().splitlines() if line]
        turns = [[item["question"], *item.get("then", ())] for item in found]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise typer.BadParameter(
            f"{path}: each line needs a JSON object with `question`"
        ) from error
    if not turns:
        raise typer.BadParameter(f"{path} has no question")
    first = random.randrange(10**8) if task is None else task
    # Other digits from the first one on: with those in common, prompts would share a KV block.
    numbers = ((first + n * 11_111_111) % 10**8 for n in range(len(turns)))
    return [
        [f"Task {number:08}. {asked}", *then]
        for number, (asked, *then) in zip(numbers, turns, strict=True)
    ]


def check_server(base_url: str, roles: Sequence[str]) -> None:
    """Exit with a message if no server answers, or one without these roles."""
    try:
        with urllib.request.urlopen(f"{base_url.rstrip('/')}/models", timeout=10) as response:
            served = {model["id"] for model in json.load(response)["data"]}
    except OSError as error:
        raise typer.BadParameter(
            f"no server answers at {base_url} ({error}); "
            "start one with: prefillshare serve examples/react/cluster.yaml"
        ) from error
    if missing := [role for role in roles if role not in served]:
        raise typer.BadParameter(f"the server at {base_url} has no role {', '.join(missing)}")


def run(graph: Any, team: Team, turns: Sequence[str], console: Console) -> Session:
    """Run the graph on one conversation in a new session; print its steps and what they cost."""
    shown: set[str] = set()
    with team.session() as session:
        config = {"configurable": {"thread_id": session.id}}
        for text in turns:
            console.print(f"\n[bold]{text}[/]\n")
            asked = {"messages": [("user", text)]}
            for update in graph.stream(asked, config, stream_mode="updates"):
                show(console, update, shown)
    session.close()
    print_usage(console, session.usage)
    return session


def show(console: Console, update: Mapping[str, Any], shown: set[str]) -> None:
    """Print the messages that a step of a graph adds to its state, each answer once."""
    for node, added in update.items():
        values = added.values() if isinstance(added, Mapping) else ()
        for value in (value for value in values if isinstance(value, list)):
            for message in value:
                if isinstance(message, AIMessage) and message.id:
                    if message.id in shown:
                        continue
                    shown.add(message.id)
                if isinstance(message, BaseMessage):
                    say(console, message.name or node, text_of(message))


def say(console: Console, speaker: str, text: str) -> None:
    """Print who said what, on one line."""
    short = textwrap.shorten(text, 120, placeholder=" …")
    console.print(f"{speaker:>10}  {short}", markup=False, soft_wrap=True)


def text_of(message: BaseMessage) -> str:
    """Return what a message says: text, or a tool call."""
    calls = message.tool_calls if isinstance(message, AIMessage) else []
    said = [f"{call['name']}({json.dumps(call['args'])})" for call in calls]
    return " ".join([str(message.text), *said])


def print_usage(console: Console, usage: SessionUsage) -> None:
    """Print the session table, and below it what one prefill per model would have computed."""
    console.print()
    console.print(usage)
    computed, alone = usage.computed_tokens, usage.per_model_prefill_tokens
    console.print(
        f"One prefill per model would have computed {alone:,} prompt tokens"
        + (f": {alone / computed:.1f} times as many." if computed else ".")
    )
