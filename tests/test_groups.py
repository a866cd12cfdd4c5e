"""Tests that share a cluster run in one process."""

from pathlib import Path

from tests.groups import LONGEST_FIRST, group, rank

ROOT = Path(__file__).parents[1]


def test_files_that_share_their_folders_cluster_stay_together() -> None:
    assert group("tests/lora/test_pool.py::test_one") == "tests/lora"
    assert group("tests/lora/test_exactness.py::test_two[colocated]") == "tests/lora"


def test_files_without_one_are_apart() -> None:
    assert group("tests/sdk/test_team.py::test_one") == "tests/sdk/test_team.py"


def test_what_takes_long_is_a_group_and_comes_first() -> None:
    files = [name if name.endswith(".py") else f"{name}/test_any.py" for name in LONGEST_FIRST]
    assert [group(f"{file}::test_one") for file in files] == list(LONGEST_FIRST)
    assert [name for name in LONGEST_FIRST if not (ROOT / name).exists()] == []
    assert rank(LONGEST_FIRST[-1]) < rank("tests/sdk/test_team.py")
