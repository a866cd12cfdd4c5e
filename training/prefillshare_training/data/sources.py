"""Where rows come from: JSONL, JSON and parquet files, folders of these, and the hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from prefillshare_server.errors import ConfigError, Problem, suggestion
from prefillshare_training.data.presets import PRESETS, Preset

_SUFFIXES = (".jsonl", ".json", ".parquet")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NO_DATA = {"dataset_info.json", "dataset_infos.json"}


class Record(NamedTuple):
    """One row as it was read, and where."""

    place: str
    """For example ``data.jsonl: line 3``."""
    value: object
    problem: str | None = None
    """Why there is no value."""


@dataclass(frozen=True, slots=True)
class Source:
    """Rows that were found, not yet read."""

    name: str
    """As the user named it."""
    preset: Preset | None
    records: Callable[[], Iterator[Record]]
    sha256: Callable[[], str]
    """Of the files' bytes; for the hub, of the rows as canonical JSON."""


def find(source: str, preset_name: str | None) -> Source:
    """The rows of `source`: a path, a hub id, or the name of a preset, which stands for its own.

    A hub id that belongs to a preset implies the preset. Raises ConfigError when there is nothing
    to read.
    """
    preset = _preset(preset_name)
    path = Path(source).expanduser()
    if path.exists():
        files = _files(path, preset)
        return Source(
            source, preset, lambda: _read_files(files, path), lambda: _sha256_of_files(files, path)
        )
    if source.startswith((".", "/", "~")) or path.suffix in _SUFFIXES:
        raise ConfigError(Problem(source, "there is no such file or folder", "check the path"))
    if preset is None:
        preset = PRESETS.get(source) or next(
            (each for each in PRESETS.values() if each.hub_id == source), None
        )
    hub_id = preset.hub_id if preset and source in PRESETS else source
    if not _HUB_ID.fullmatch(hub_id):
        raise ConfigError(
            Problem(
                f"data {source!r}",
                "neither a file or folder, nor a hub id (owner/name), nor a preset",
                suggestion(source, PRESETS),
            )
        )
    rows = _hub_rows(hub_id, preset)
    return Source(source, preset, lambda: _read_rows(hub_id, rows), lambda: _sha256_of_rows(rows))


def _preset(name: str | None) -> Preset | None:
    if name is None:
        return None
    if name not in PRESETS:
        raise ConfigError(
            Problem(f"preset {name!r}", "there is no such preset", suggestion(name, PRESETS))
        )
    return PRESETS[name]


def _files(path: Path, preset: Preset | None) -> list[Path]:
    """The data files at `path`, sorted; of a copy of a hub repository, those of the split."""
    if path.is_file():
        return [path]
    folder = path
    if preset and preset.config and (path / preset.config).is_dir():
        folder = path / preset.config
    for suffix in _SUFFIXES:
        files = sorted(
            file
            for file in folder.rglob(f"*{suffix}")
            if file.name not in _NO_DATA and not file.name.startswith(".")
        )
        split = preset.split if preset else "train"
        # A folder that has its splits apart names the files by them.
        if files := [file for file in files if file.name.startswith(split)] or files:
            return files
    raise ConfigError(
        Problem(
            str(path),
            f"holds no data files ({', '.join(_SUFFIXES)})",
            "point to a file, or to the folder with the files",
        )
    )


def _read_files(files: Iterable[Path], root: Path) -> Iterator[Record]:
    for file in files:
        name = str(root if file == root else root / file.relative_to(root))
        try:
            if file.suffix == ".parquet":
                yield from _parquet(file, name)
            elif _is_array(file):
                yield from _array(file, name)
            else:
                yield from _lines(file, name)
        except OSError as error:
            raise ConfigError(
                Problem(name, f"cannot be read ({error.strerror or error})", "check the file")
            ) from None


def _lines(file: Path, name: str) -> Iterator[Record]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _parsed(line, f"{name}: line {number}")


def _parsed(line: bytes, place: str) -> Record:
    try:
        return Record(place, json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return Record(place, None, f"is not UTF-8 (byte {error.start + 1} of the line)")
    except json.JSONDecodeError as error:
        return Record(place, None, f"is not JSON ({error.msg}, character {error.pos + 1})")
    except RecursionError:
        return Record(place, None, "is nested too deeply")


def _is_array(file: Path) -> bool:
    """Whether one JSON array holds all rows. Many `.json` files are JSONL."""
    with file.open("rb") as content:
        return content.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _array(file: Path, name: str) -> Iterator[Record]:
    try:
        items = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            Problem(name, f"is not JSON ({error})", "correct it, or write one object per line")
        ) from None
    for number, item in enumerate(items, 1):
        yield Record(f"{name}: item {number}", item)


def _parquet(file: Path, name: str) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        number = 0
        for batch in table.iter_batches():
            for value in batch.to_pylist():
                number += 1
                yield Record(f"{name}: row {number}", value)
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            Problem(name, f"is no readable parquet file ({reason})", "copy or download it again")
        ) from None


def _hub_rows(hub_id: str, preset: Preset | None) -> Iterable[Any]:
    """The rows of a data set on the hub, downloaded first unless they are in the cache."""
    import datasets

    split = preset.split if preset else "train"
    name = next((name for name, each in PRESETS.items() if each is preset), None)
    try:
        rows: Iterable[Any] = datasets.load_dataset(
            hub_id, preset.config if preset else None, split=split
        )
    # Its failures have no common class: of the network, the hub, the cache, the files.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            Problem(
                f"data {hub_id}",
                f"cannot be loaded from the hub ({reason})",
                "check the name and the network, or download it elsewhere and give the path of "
                "its files" + (f" with --preset {name}" if name else ""),
            )
        ) from None
    return rows


def _read_rows(hub_id: str, rows: Iterable[Any]) -> Iterator[Record]:
    for number, value in enumerate(rows, 1):
        yield Record(f"{hub_id}: row {number}", value)


def _sha256_of_files(files: list[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        if file != root:
            digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _sha256_of_rows(rows: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        canonical = json.dumps(row, sort_keys=True, ensure_ascii=True, default=str)
        digest.update(canonical.encode() + b"\n")
    return digest.hexdigest()
