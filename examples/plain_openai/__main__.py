"""`python -m examples.plain_openai`: a plain OpenAI program inside a session."""

from pathlib import Path

import typer
from rich.console import Console

from examples.plain_openai.after import answer
from examples.running import URL, BaseUrl, Questions, Task, check_server, print_usage, read, say
from prefillshare_agents import Session

QUESTIONS = Path(__file__).with_name("questions.jsonl")


def main(
    base_url: BaseUrl = URL, questions: Questions = QUESTIONS, task: Task = None
) -> list[Session]:
    """Run the program on each question, in a session that it knows nothing of."""
    check_server(base_url, ("solver", "critic"))
    console = Console(highlight=False)
    return [run(base_url, turns[0], console) for turns in read(questions, task)]


def run(base_url: str, question: str, console: Console) -> Session:
    console.print(f"\n[bold]{question}[/]\n")
    session = Session(base_url=base_url)
    with session:
        completions = answer(base_url, question)
    for completion in completions:
        say(console, completion.model, str(completion.choices[0].message.content))
    session.close()
    print_usage(console, session.usage)
    return session


if __name__ == "__main__":
    typer.run(main)
