"""Where a decoder is written, and what is never removed for it.

Only the guard itself is asked about dangerous places, and inside the test's own folder: a run with
a broken guard would remove what it is pointed at.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from prefillshare_server.errors import ConfigError
from prefillshare_server.models.provenance import FILE
from prefillshare_training.output import take_place
from prefillshare_training.run_state import require_free_output
from prefillshare_training.settings import TrainSettings
from prefillshare_training.train import train
from tests.training.runs import QUIET, settings, weights


@pytest.mark.parametrize("out", [".", "..", "/", "decoder/.."])
def test_an_output_without_a_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    inner = tmp_path / "one" / "two"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    run = TrainSettings(base="-", data="-", out=Path(out), overwrite=True)
    with pytest.raises(ConfigError, match="names no folder of its own"):
        require_free_output(run, tmp_path / "base")


@pytest.mark.parametrize("what", ["base", "data"])
@pytest.mark.parametrize("place", ["out", "out/inner", "out.run/inner"])
def test_what_a_run_reads_is_not_replaced_by_what_it_writes(
    tmp_path: Path, what: str, place: str
) -> None:
    """Not even when it is a decoder of an earlier run, which may be replaced otherwise."""
    kept, elsewhere = tmp_path / place, tmp_path / "elsewhere"
    kept.mkdir(parents=True)
    (kept / FILE).touch()
    data, base = (kept, elsewhere) if what == "data" else (elsewhere, kept)
    run = TrainSettings(base="-", data=str(data), out=tmp_path / "out", overwrite=True)
    with pytest.raises(ConfigError, match=f"would take the place of {kept}"):
        require_free_output(run, base)


def test_a_folder_that_no_run_has_written_is_not_cleared(base_dir: Path, tmp_path: Path) -> None:
    run = settings(base_dir, tmp_path, overwrite=True)
    run.run_dir.mkdir()
    (run.run_dir / "mine").touch()
    with pytest.raises(ConfigError, match=r"decoder\.run is there and is no run's folder"):
        train(run, QUIET)
    assert (run.run_dir / "mine").exists()


def test_a_folder_that_cannot_be_written_is_named(base_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = settings(base_dir, tmp_path, out=tmp_path / "file" / "decoder")
    with pytest.raises(ConfigError, match=r"decoder\.run: cannot be written"):
        train(run, QUIET)


def test_a_link_stays_one_and_leads_to_the_decoder(base_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    run = settings(base_dir, tmp_path)
    run.out.symlink_to(tmp_path / "elsewhere")
    train(run, QUIET)
    assert run.out.is_symlink()
    assert weights(tmp_path / "elsewhere")


def test_a_decoder_that_cannot_be_replaced_stays(tmp_path: Path) -> None:
    new, out = tmp_path / "new", tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    with pytest.raises(OSError, match="new"):
        take_place(new, out)
    assert (out / "old").exists()
