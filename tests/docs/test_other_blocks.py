"""Cluster files of the documents are valid, and their commands exist with all their options."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from prefillshare_agents import SessionUsage
from prefillshare_agents._table import usage_table
from prefillshare_server.cli import app
from prefillshare_server.config import Cluster

from .blocks import ROOT, Block, blocks, blocks_of

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
_SMALLEST = {"base": {"model": "a-base"}, "roles": {"a-role": {"model": "a-decoder"}}}


def place(block: Block) -> str:
    return block.place


def commands(text: str) -> list[list[str]]:
    """The words of each command of a bash block."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def parse(words: list[str]) -> None:
    """Let typer read a `prefillshare` command without running it. Raises what typer raises."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        try:
            context = command.make_context(words[0], words[1:])
        except typer.Exit:  # --help, --version
            return
        words = [*getattr(context, "_protected_args", ()), *context.args]
        assert words[0] in command.commands, f"no command {words[0]!r}"
        command = command.commands[words[0]]
    command.make_context(words[0], words[1:])


@pytest.mark.parametrize("block", blocks_of("yaml"), ids=place)
def test_a_cluster_file_of_the_documents_is_valid(block: Block, tmp_path: Path) -> None:
    given = yaml.safe_load(block.text)
    # A part of a cluster file is valid if it is in a whole one.
    file = tmp_path / "cluster.yaml"
    missing = {name: part for name, part in _SMALLEST.items() if name not in given}
    file.write_text(block.text + "\n" + (yaml.safe_dump(missing) if missing else ""))
    Cluster.load(file)


@pytest.mark.parametrize("block", blocks_of("bash"), ids=place)
def test_the_commands_of_the_documents_exist(block: Block) -> None:
    for words in commands(block.text):
        program, *rest = words
        if program == "prefillshare":
            parse(words)
        if program == "make":
            named = [word for word in rest if "=" not in word and not word.startswith("-")]
            assert set(named) <= TARGETS


def columns(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_every_session_table_that_is_shown_has_the_columns_of_the_real_one() -> None:
    real = [str(column.header) for column in usage_table(SessionUsage.of([])).columns]
    lines = [line for block in blocks_of("text") for line in block.text.splitlines()]
    shown = [columns(line) for line in lines if columns(line)[:2] == real[:2]]
    assert shown
    assert [each for each in shown if each != real] == []
    [comment] = re.findall(
        r"rich\.print\(session\.usage\)  # (.+)", (ROOT / "README.md").read_text()
    )
    assert [name for name in real[1:] if name not in comment] == []


def test_the_linters_output_on_its_page_is_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, output = (
        next(b.text for b in blocks(ROOT / "docs" / "prefix.md") if b.language == language)
        for language in ("json", "text")
    )
    (tmp_path / "trace.jsonl").write_text(trace)
    monkeypatch.setenv("COLUMNS", "100")
    done = CliRunner().invoke(app, ["lint", str(tmp_path / "trace.jsonl")])
    assert [line.rstrip() for line in done.output.strip().splitlines()] == output.splitlines()


@pytest.mark.parametrize("block", blocks_of("json"), ids=place)
def test_the_json_of_the_documents_is_json(block: Block) -> None:
    try:
        json.loads(block.text)
    except ValueError:  # or lines of it
        assert all(json.loads(line) for line in block.text.splitlines())
