"""Systems that were measured unequally often: each repeat has sessions of its own."""

from pathlib import Path
from typing import Any

import pytest

from prefillshare_bench.report import files
from prefillshare_bench.report.points import read
from prefillshare_bench.report.sections import Section, sections
from tests.bench import folders


@pytest.fixture
def uneven(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """PrefillShare is four times as good in repeat 0, which the others have too, and far more so
    in two that they have not."""
    for experiment in ("react", "swarm"):
        for repeat, better in enumerate((4, 100, 100)):
            measured = folders.figures(better)
            folders.point(tmp_path, experiment, "prefillshare", repeat=repeat, measured=measured)
        for system in ("per_model", "shared_pool"):
            folders.point(tmp_path, experiment, system)
    return files.results(read(tmp_path))


def section(found: dict[str, dict[str, Any]], name: str) -> Section:
    [wanted] = [each for each in sections(found) if each.name == name]
    return wanted


def test_a_ratio_is_of_the_repeats_that_both_have(uneven: dict[str, dict[str, Any]]) -> None:
    serving = uneven["serving_react"]
    assert (serving["prefillshare"]["repeats"], serving["per_model"]["repeats"]) == (3, 1)
    assert serving["ratios"]["per_model"]["throughput_tok_s"] == 4
    assert serving["loads"][0]["ratios"]["per_model"]["p95_s"] == 4
    assert serving["up_to"]["per_model"]["p95_s"]["ratio"] == 4
    assert uneven["attribution"]["ratios"]["shared_pool"]["local_prefill_tokens"] == 4


def test_so_is_a_ratio_of_what_is_kept(tmp_path: Path) -> None:
    folders.point(tmp_path, "memory", "per_model", memory_bytes=8 * 2**30)
    for repeat, size in enumerate((2, 64)):
        folders.point(tmp_path, "memory", "prefillshare", repeat=repeat, memory_bytes=size * 2**30)
    memory = files.results(read(tmp_path))["memory"]
    assert memory["systems"]["prefillshare"]["memory_bytes"] == 33 * 2**30
    assert memory["ratios"]["per_model"]["memory_bytes"] == 4


def test_tables_of_pairs_show_that_ratio(uneven: dict[str, dict[str, Any]]) -> None:
    [row] = section(uneven, "swarm").tables[0].rows
    assert [cell for cell in row if cell.endswith("×")] == ["4.00×", "4.00×"]


@pytest.mark.parametrize("name", ["serving_react", "attribution"])
def test_how_often_each_was_measured_is_told(uneven: dict[str, dict[str, Any]], name: str) -> None:
    notes = " ".join(section(uneven, name).notes)
    assert "per-model baseline: 1" in notes
    assert "PrefillShare: 3" in notes


def test_equally_many_are_not_told(tmp_path: Path) -> None:
    for system in ("prefillshare", "per_model"):
        folders.point(tmp_path, "react", system)
    notes = section(files.results(read(tmp_path)), "serving_react").notes
    assert not any("Measurements" in note for note in notes)


def test_without_a_repeat_in_common_there_is_no_ratio(tmp_path: Path) -> None:
    folders.point(tmp_path, "react", "prefillshare", repeat=0)
    folders.point(tmp_path, "react", "per_model", repeat=1)
    assert files.results(read(tmp_path))["serving_react"]["ratios"] == {"per_model": {}}
