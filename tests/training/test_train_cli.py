"""`prefillshare train` as a user types it: what it says, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from prefillshare_server.cli import main
from prefillshare_server.models.provenance import Provenance
from tests.training.runs import write_rows

PREFILLSHARE = str(Path(sys.executable).with_name("prefillshare"))


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(tiny_home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs `prefillshare train` in this process, which has torch loaded already."""
    for name, value in environment(tiny_home).items():
        monkeypatch.setenv(name, value)

    def command(*options: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["prefillshare", "train", *map(str, options)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    return command


def environment(home: Path) -> dict[str, str]:
    plain = {"PREFILLSHARE_HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return {**os.environ, **plain, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


def test_one_command_makes_a_decoder(run: Run, tmp_path: Path, rows: Path) -> None:
    out = tmp_path / "decoder"
    done = run("--base", "tiny-base", "--data", rows, "--out", out, "--lora-rank", "4")
    assert done.returncode == 0, done.stderr
    record = Provenance.read(out)
    assert record is not None
    assert record.base == "tiny-base"
    assert record.hyperparameters["lora"]["alpha"] == 8
    # A.1 of the paper.
    assert {
        name: record.hyperparameters[name]
        for name in ("batch_size", "accumulation", "max_length", "epochs", "weight_decay")
    } == {
        "batch_size": 1,
        "accumulation": 16,
        "max_length": 1024,
        "epochs": 1,
        "weight_decay": 0.1,
    }
    assert record.hyperparameters["betas"] == [0.9, 0.999]
    assert record.hyperparameters["warmup_ratio"] == 0.03
    assert f"adapter: {out}" in done.stdout


def test_a_dry_run_shows_three_samples_and_writes_nothing(
    run: Run, tmp_path: Path, rows: Path
) -> None:
    done = run("--base", "tiny-base", "--data", rows, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sample ") == 3
    assert "Write it backwards." in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_a_bad_line_is_named_with_its_number(run: Run, tmp_path: Path, rows: Path) -> None:
    lines = rows.read_text().splitlines()
    lines[6] = '{"messages": [{"role": "user", "content": "no answer"}]}'
    rows.write_text("\n".join(lines))
    out = tmp_path / "decoder"
    options = ("--base", "tiny-base", "--data", rows, "--out", out)
    done = run(*options)
    assert done.returncode == 2
    assert "line 7" in done.stderr
    assert "--skip-bad" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()
    done = run(*options, "--skip-bad")
    assert done.returncode == 0, done.stderr
    assert "1 bad rows" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--learning-rate", "-1"], "--learning-rate"),
        (["--method", "dpo"], "--method"),
        (["--learning-rate-grid", "1e-4,fast"], "--learning-rate-grid"),
        (["--lora-rank", "0"], "rank"),
        (["--limit", "0"], "--limit"),
        (["--tail-role", "tool"], "tail"),
        (["--max-length", "4"], "raise --max-length"),
        (["--preset", "alpaca"], "metamathqa"),
        (["--base", "tiny-bases"], "tiny-base"),
    ],
)
def test_a_bad_option_is_named_in_one_line(
    run: Run, tmp_path: Path, rows: Path, options: list[str], said: str
) -> None:
    out = tmp_path / "decoder"
    given = ["--base", "tiny-base", "--data", rows, "--out", out, *options]
    done = run(*given)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_ctrl_c_ends_with_a_checkpoint_and_says_how_to_go_on(
    tiny_home: Path, tmp_path: Path, rows: Path
) -> None:
    out = tmp_path / "decoder"
    command = [PREFILLSHARE, "train", "--base", "tiny-base", "--data", str(rows)]
    command += ["--out", str(out), "--accumulation", "1", "--epochs", "500", "--save-steps", "2"]
    with subprocess.Popen(
        command, env=environment(tiny_home), stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 200
        while not list(tmp_path.glob("decoder.run/checkpoint-*/complete")):
            assert time.monotonic() < deadline, "no checkpoint was written"
            assert process.poll() is None, "the run ended by itself"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "--resume" in said
    assert "Traceback" not in said
    assert not out.exists()
    settings = json.loads((tmp_path / "decoder.run" / "run.json").read_text())
    assert settings["epochs"] == 500
