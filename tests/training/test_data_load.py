"""From files to samples: nothing is lost or cut without being counted."""

import hashlib
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console

from prefillshare_server.config import LayoutSettings
from prefillshare_server.errors import ConfigError
from prefillshare_training.data import Dataset, Renderer, load, progress_bar


@pytest.fixture(scope="module")
def renderer(tiny_home: Path) -> Renderer:
    return Renderer.for_base(tiny_home / "models" / "tiny-base", LayoutSettings())


def row(number: int, answer: str = "yes") -> dict[str, Any]:
    return {"prompt": f"{number:03d}", "completion": answer}


def write(path: Path, rows: Iterable[object]) -> Path:
    lines = [line if isinstance(line, str) else json.dumps(line) for line in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def prompts(data: Dataset, renderer: Renderer) -> list[str]:
    return [renderer.decode(sample.turns[0].prompt_ids) for sample in data.samples]


def test_lines_become_samples_in_their_order(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path / "rows.jsonl", [row(1), "", row(2)])
    data = load(str(path), renderer)
    assert prompts(data, renderer) == ["001", "002"]
    assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (data.source, data.skipped, data.too_long) == (str(path), 0, 0)
    assert (data.turns, data.tokens) == (2, (6, 8))


@pytest.mark.parametrize("begin", ["", "\ufeff", " \n"])
def test_a_json_array_is_read_as_well(tmp_path: Path, renderer: Renderer, begin: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(begin + json.dumps([row(1), row(2)], indent=1), encoding="utf-8")
    assert prompts(load(str(path), renderer), renderer) == ["001", "002"]


def test_many_json_files_are_lines(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path / "rows.json", [row(1), row(2)])
    assert prompts(load(str(path), renderer), renderer) == ["001", "002"]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_a_parquet_file_is_read_as_well(tmp_path: Path, renderer: Renderer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    empty = {"messages": None, "prompt": None, "completion": None}
    path = write_parquet(
        tmp_path / "rows.parquet", [{**empty, "messages": messages}, {**empty, **row(2)}]
    )
    data = load(str(path), renderer)
    assert prompts(data, renderer)[1] == "002"
    assert renderer.decode(data.samples[0].turns[0].completion_ids) == "b<|im_end|>"


def test_of_a_folder_the_training_split_is_read(tmp_path: Path, renderer: Renderer) -> None:
    (tmp_path / "main").mkdir()
    (tmp_path / "socratic").mkdir()
    for folder in ("main", "socratic"):
        for split, number in (("train-0", 1), ("train-1", 2), ("test-0", 3)):
            rows = [{"question": f"{folder}{number}", "answer": "yes"}]
            write_parquet(tmp_path / folder / f"{split}.parquet", rows)
    data = load(str(tmp_path), renderer, preset="gsm8k")
    assert len(data.samples) == 2
    assert all("main" in prompt for prompt in prompts(data, renderer))
    (tmp_path / "main" / "train-0.parquet").rename(tmp_path / "main" / "train-2.parquet")
    assert load(str(tmp_path), renderer, preset="gsm8k").sha256 != data.sha256


def test_a_preset_reads_rows_in_its_own_form(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "2 + 3?", "answer": "#### 5"}])
    [sample] = load(str(path), renderer, preset="gsm8k").samples
    assert renderer.decode(sample.turns[0].completion_ids) == "#### 5<|im_end|>"


BAD = [
    row(1),
    "{",
    '{"text": "a"}',
    row(4),
    row(5, ""),
    {"messages": [{"role": "user", "content": "a"}]},
    row(7, "yes<|im_end|>no"),
]
PROBLEMS = [
    "line 2: is not JSON (Expecting property name enclosed in double quotes, character 3)",
    "line 3: has neither messages nor prompt and completion (its keys: text)",
    "line 5: completion: is empty; there is nothing to learn",
    "line 6: messages[0].role: the last message is by 'user'",
]
LATE = "line 7: completion: '<|im_end|>' in the text would end the answer there"


def test_bad_rows_are_refused_with_their_lines(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path / "rows.jsonl", BAD)
    with pytest.raises(ConfigError) as refusal:
        load(str(path), renderer)
    found = str(refusal.value).splitlines()
    assert len(found) == len(PROBLEMS)
    for line, problem in zip(found, PROBLEMS, strict=True):
        assert line.startswith(f"{path}: {problem}")
        assert "--skip-bad" in line


def test_rows_that_cannot_be_rendered_are_bad_as_well(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path / "rows.jsonl", [row(1), BAD[-1]])
    with pytest.raises(ConfigError) as refusal:
        load(str(path), renderer)
    assert str(refusal.value).startswith(f"{path}: {LATE.replace('line 7', 'line 2')}")


def test_bad_rows_can_be_left_out_and_are_counted(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path / "rows.jsonl", BAD)
    data = load(str(path), renderer, skip_bad=True)
    assert prompts(data, renderer) == ["001", "004"]
    assert data.skipped == 5
    for problem, expected in zip(data.problems, [*PROBLEMS, LATE], strict=True):
        assert str(problem).startswith(f"{path}: {expected}")


def test_only_the_first_bad_rows_are_listed(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path / "rows.jsonl", ["{"] * 9)
    with pytest.raises(ConfigError) as refusal:
        load(str(path), renderer)
    lines = str(refusal.value).splitlines()
    assert len(lines) == 6
    assert lines[-1].startswith(f"{path}: 4 more rows are bad")


def test_a_field_of_a_prompt_is_named_as_the_row_has_it(tmp_path: Path, renderer: Renderer) -> None:
    user = {"role": "user", "content": "a"}
    bad = {"role": "assistant", "content": "yes<|im_end|>no"}
    good = {"role": "assistant", "content": "yes"}
    rows = [
        {"prompt": [user, bad], "completion": [user, good]},
        {"prompt": [user], "completion": [good, user, bad]},
    ]
    data = load(str(write(tmp_path / "rows.jsonl", [*rows, row(3)])), renderer, skip_bad=True)
    assert [problem.what.split(":")[0] for problem in data.problems] == [
        "prompt[1].content",
        "completion[2].content",
    ]


def test_of_a_prompt_nothing_is_learned(tmp_path: Path, renderer: Renderer) -> None:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    path = write(
        tmp_path / "rows.jsonl", [{"prompt": [user, answer, user], "completion": [answer]}]
    )
    assert load(str(path), renderer).turns == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"prompt": "\xff"}\n', "line 1: is not UTF-8 (byte 13 of the line)"),
        (b'{"a": ' * 100_000, "line 1: is nested too deeply"),
        (b"[1, 2", "is not JSON"),
        (b"", "holds no rows"),
    ],
)
def test_files_that_are_no_rows_are_refused(
    tmp_path: Path, renderer: Renderer, content: bytes, problem: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        load(str(path), renderer)
    assert str(refusal.value).startswith(f"{path}: {problem}")


def test_a_damaged_parquet_file_is_refused(tmp_path: Path, renderer: Renderer) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(ConfigError, match="is no readable parquet file"):
        load(str(path), renderer)


def test_long_rows_are_left_out_and_counted(tmp_path: Path, renderer: Renderer) -> None:
    # One token per byte: 3 of prompt, 3 of answer, and its end.
    path = write(tmp_path / "rows.jsonl", [row(1), row(2, "no, never"), row(3)])
    data = load(str(path), renderer, max_length=7)
    assert prompts(data, renderer) == ["001", "003"]
    assert (data.too_long, data.skipped) == (1, 0)
    with pytest.raises(ConfigError, match=r"all 3 readable rows are longer than 6 tokens; raise"):
        load(str(path), renderer, max_length=6)


def test_a_subset_is_drawn_by_the_seed(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path / "rows.jsonl", [row(number) for number in range(40)])
    drawn = [prompts(load(str(path), renderer, limit=5, seed=seed), renderer) for seed in (0, 0, 1)]
    assert [len(each) for each in drawn] == [5, 5, 5]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(each == sorted(each) for each in drawn)


def test_a_subset_is_filled_up_for_rows_that_are_too_long(
    tmp_path: Path, renderer: Renderer
) -> None:
    rows = [row(number, "yes" if number % 2 else "no, never") for number in range(40)]
    path = write(tmp_path / "rows.jsonl", rows)
    data = load(str(path), renderer, limit=15, max_length=7)
    assert len(data.samples) == 15
    assert data.too_long > 0


def test_a_limit_above_the_rows_takes_them_all(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path / "rows.jsonl", [row(1), row(2)])
    assert prompts(load(str(path), renderer, limit=9), renderer) == ["001", "002"]


def test_progress_counts_samples(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path / "rows.jsonl", [row(number) for number in range(120)])
    seen: list[tuple[int, int]] = []
    load(str(path), renderer, progress=lambda done, wanted: seen.append((done, wanted)))
    assert seen == [(0, 120), (50, 120), (100, 120), (120, 120)]


def test_a_bar_shows_the_progress(tmp_path: Path, renderer: Renderer) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with progress_bar(console) as report:
        report(50, 120)
    assert isinstance(console.file, io.StringIO)
    assert "50/120" in console.file.getvalue()


@pytest.mark.parametrize(
    ("source", "preset", "problem"),
    [
        ("./missing", None, "./missing: there is no such file or folder"),
        ("missing.jsonl", None, "missing.jsonl: there is no such file or folder"),
        ("gsm8", None, "data 'gsm8': neither a file or folder, nor a hub id (owner/name), nor"),
        ("gsm8", None, "did you mean 'gsm8k'?"),
        (".", "gsm", "preset 'gsm': there is no such preset; did you mean 'gsm8k'?"),
    ],
)
def test_sources_that_do_not_exist_are_refused(
    renderer: Renderer, source: str, preset: str | None, problem: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(source, renderer, preset=preset)
    assert problem in str(refusal.value)


def test_a_folder_without_data_is_refused(tmp_path: Path, renderer: Renderer) -> None:
    (tmp_path / "README.md").write_text("nothing here")
    with pytest.raises(ConfigError, match="holds no data files"):
        load(str(tmp_path), renderer)


def test_a_hub_that_cannot_be_reached_is_one_clear_error(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach the hub\nand a long story")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConfigError) as refusal:
        load("gsm8k", renderer)
    assert str(refusal.value) == (
        "data openai/gsm8k: cannot be loaded from the hub (Couldn't reach the hub); check the name "
        "and the network, or download it elsewhere and give the path of its files"
        " with --preset gsm8k"
    )


@pytest.mark.parametrize("source", ["gsm8k", "openai/gsm8k"])
def test_a_preset_knows_where_its_rows_are(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    asked: list[object] = []

    def loaded(*args: object, **options: object) -> datasets.Dataset:
        asked.append((args, options))
        return datasets.Dataset.from_list([{"question": "2 + 3?", "answer": "#### 5"}])

    monkeypatch.setattr(datasets, "load_dataset", loaded)
    data = load(source, renderer)
    assert asked == [(("openai/gsm8k", "main"), {"split": "train"})]
    assert len(data.samples) == 1
    canonical = b'{"answer": "#### 5", "question": "2 + 3?"}\n'
    assert data.sha256 == hashlib.sha256(canonical).hexdigest()
