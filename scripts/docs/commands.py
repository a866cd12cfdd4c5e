"""The reference of the `prefillshare` command, from the program itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer
from rich.text import Text

from prefillshare_server.cli import app
from scripts.docs.markdown import code, escaped, fence, page, table

INTRODUCTION = """\
# Commands

`prefillshare COMMAND --help` shows the same on the terminal. A mistake that you can mend ends a
command with exit code 2 and one line for each problem.
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that can be run, or a group of them."""

    name: str
    """With the program's: `prefillshare roles set`."""
    command: Any
    """typer's object."""


def commands() -> list[Command]:
    """All of them, groups before their members."""
    return list(_walk("prefillshare", typer.main.get_command(app)))


def commands_page() -> str:
    """The page."""
    blocks = [INTRODUCTION]
    for each in commands():
        blocks += [f"## {each.name}", *_blocks(each)]
    return page(*blocks)


def _walk(name: str, command: Any) -> Iterator[Command]:
    yield Command(name, command)
    for inner, member in sorted(getattr(command, "commands", {}).items()):
        yield from _walk(f"{name} {inner}", member)


def _blocks(each: Command) -> Iterator[str]:
    context = each.command.context_class(each.command, info_name=each.name)
    usage = " ".join(map(_usage, each.command.collect_usage_pieces(context)))
    yield fence("text", f"{each.name} {usage}")
    yield from _help(each.command.help or "")
    records = [parameter.get_help_record(context) for parameter in each.command.params]
    rows = [_row(*record) for record in records if record is not None]
    if rows:
        yield table(["argument or option", "what it does", "default"], rows)


def _usage(piece: str) -> str:
    """A part of the usage line, without typer's marks around a name that says `…` itself."""
    if "…" in piece:
        return piece.removesuffix("...")[1:-1]
    return re.sub(r"^\{(.*)\}", r"\1", piece)


def _row(names: str, told: str) -> list[str]:
    """A row of typer's own two columns, whose second ends with what is known beside the text."""
    text, _, more = f"  {told}".rpartition("  [") if told.endswith("]") else (told, "", "")
    facts = dict(fact.partition(": ")[::2] for fact in more.removesuffix("]").split("; ") if fact)
    if "env var" in facts:
        text += f" Environment: {code(facts['env var'])}."
    default = "required" if "required" in facts else code(facts.get("default", ""))
    return [code(names), _plain(text) or "–", default if default != "``" else "–"]


def _help(text: str) -> Iterator[str]:
    """The paragraphs of a help text; what can be run becomes a block of code."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        plain = Text.from_markup(paragraph).plain.strip()
        said, found, line = plain.partition("prefillshare ")
        if found and said.strip() in ("", "Example:", "Try:"):
            lines = re.sub(r"\n\s*(?!prefillshare)", r" \\\n    ", found + line)
            yield fence("bash", "\n".join(re.split(r"\s+then\s+", lines)))
        elif plain != "Examples:":
            yield _plain(paragraph)


def _plain(text: str) -> str:
    """Rich's markup as Markdown, on one line."""
    marked = re.sub(r"\[bold\](.+?)\[/bold\]", r"`\1`", text)
    pieces = " ".join(Text.from_markup(marked).plain.split()).split("`")
    pieces[::2] = map(escaped, pieces[::2])  # code stays as it is
    return "`".join(pieces)
