"""`prefillshare eval` as a user runs it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from prefillshare_server.errors import ConfigError
from prefillshare_training.evaluate.cli import INTERRUPTED, evaluate


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer(rich_markup_mode="rich")
    app.command("eval")(evaluate)
    # With one command only, typer would not want its name.
    app.command("other")(lambda: None)
    return app


@pytest.fixture
def options(base_dir: Path, tmp_path: Path) -> list[str]:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "abc", "answer": "d"}\n{"prompt": "xy", "answer": "b"}\n')
    decoder = base_dir.with_name("tiny-a")
    return [
        *("eval", "--base", str(base_dir), "--decoder", str(decoder), "--task", "exact"),
        *("--data", str(data), "--max-tokens", "3", "--out", str(tmp_path / "answers.jsonl")),
    ]


def run(app: typer.Typer, options: list[str], code: int = 0) -> str:
    done = CliRunner().invoke(app, options, env={"TERM": "dumb", "COLUMNS": "100"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


def test_help_teaches(app: typer.Typer) -> None:
    text = run(app, ["eval", "--help"])
    for word in ("--task", "--mode", "--record", "bfcl-simple-python", "Examples", "Ctrl-C"):
        assert word in text


def test_the_result_is_shown(app: typer.Typer, options: list[str]) -> None:
    shown = run(app, options)
    assert re.search(r"exact +0\.0 % +\(95 %: 0\.0 to 65\.8\)", shown)
    assert "2 answers reached --max-tokens" in shown


def test_the_result_as_json(app: typer.Typer, options: list[str]) -> None:
    result = json.loads(run(app, [*options, "--json"]))
    assert (result["task"], result["mode"], result["n"]) == ("exact", "shared", 2)


def test_a_ratio_is_a_mode(app: typer.Typer, options: list[str]) -> None:
    result = json.loads(run(app, [*options, "--json", "--mode", "0.5:layer"]))
    assert result["mode"] == "0.5:layer"


def test_a_wrong_option_is_named(app: typer.Typer, options: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--batch-size: 0: .*greater than or equal to 1"):
        run(app, [*options, "--batch-size", "0"])


def test_a_wrong_layout_is_named_by_its_options(app: typer.Typer, options: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        run(app, [*options, "--tail-role", "tool", "--layout", "other"])
    assert [str(each).split(":")[0] for each in caught.value.problems] == [
        "--layout",
        "--tail-role",
    ]
    assert "see prefillshare eval --help" in str(caught.value)


def test_ctrl_c_says_how_to_go_on(
    app: typer.Typer, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("prefillshare_training.evaluate.run.evaluate", stop)
    assert "the same command goes on" in run(app, options, INTERRUPTED)
