"""The file of an evaluation: never mixed up, never cut off, and gone on with after any end."""

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefillshare_server.errors import ConfigError
from prefillshare_training.evaluate.answers import Line, opened

SETTINGS = {"task": "exact", "seed": 0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def line(item: str) -> Line:
    return Line(item, "0" * 16, 3, "said \u2028 \r é", (1, 2), -0.5, "stop", {"exact": 1.0})


def write(path: Path, *items: str) -> None:
    with opened(path, SETTINGS) as file:
        for item in items:
            file.add(line(item))


def items(path: Path) -> list[str]:
    with opened(path, SETTINGS) as file:
        return list(file.lines)


def test_lines_are_found_again(path: Path) -> None:
    write(path, "a", "b")
    write(path, "c")
    assert items(path) == ["a", "b", "c"]
    assert len(path.read_bytes().split(b"\n")) == 5


@pytest.mark.parametrize("kept", range(0, 400, 7))
def test_a_process_that_ends_anywhere_loses_one_line_at_most(path: Path, kept: int) -> None:
    write(path, "a", "b")
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    found = items(path)
    assert found == ["a", "b"][: max(0, whole[:kept].count(b"\n") - 1)]
    write(path, *({"a", "b"} - {*found}))
    assert sorted(items(path)) == ["a", "b"]


@pytest.mark.parametrize(
    "text", ["my notes\n", "my notes", '{"a": 1}', '{"a": 1}\n[2]\n{"b"', '{"a": 1}\n{"b"']
)
def test_a_file_that_holds_something_else_is_kept_whole(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"holds (no answers of an|answers of another) eval"):
        items(path)
    assert path.read_text() == text


def test_answers_of_other_settings_are_kept_whole(path: Path) -> None:
    write(path, "a")
    path.write_bytes(path.read_bytes()[:-9])
    before = path.read_bytes()
    with (
        pytest.raises(ConfigError, match=r"another evaluation \(seed differ\)"),
        opened(path, {**SETTINGS, "seed": 1}),
    ):
        pass
    assert path.read_bytes() == before


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to let a file grow further, as when the disk is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_said_and_what_is_answered_is_kept(path: Path) -> None:
    write(path, "a")
    size = path.stat().st_size
    # In the middle of a line, and right behind one.
    for most in (size + 30, size):
        with (
            files_of_at_most(most),
            pytest.raises(ConfigError, match=r"cannot be written.*finished answers are kept"),
        ):
            write(path, "b")
    assert items(path) == ["a"]
    assert json.loads(path.read_text().splitlines()[0])["task"] == "exact"
