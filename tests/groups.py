"""How `make test` spreads the tests over processes: what shares a cluster stays in one of them."""

from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[1]

LONGEST_FIRST = (
    "tests/bench/test_systems.py",
    "tests/bench/test_measured.py",
    "tests/engine_faults/test_kills.py",
    "tests/lora",
    "tests/worker/test_serve.py",
    "tests/engine",
    "tests/examples",
    "tests/engine_faults/test_histories.py",
    "tests/worker",
    "tests/worker/test_lifetime.py",
    "tests/faults/test_scenarios.py",
    "tests/launch/test_zygote.py",
    "tests/training/test_distributed.py",
    "tests/training/test_parity_engine.py",
    "tests/models/test_adapter.py",
    "tests/training/test_train.py",
)
"""What takes half a minute or more: begun last, it would leave the other processes idle. A file
named here starts all it needs itself, also in a folder whose other files share a cluster."""


def group(nodeid: str) -> str:
    """Where a test belongs: to the folder around it that has one cluster for all, or its file."""
    file = nodeid.partition("::")[0]
    if file in LONGEST_FIRST:
        return file
    return next((str(folder) for folder in Path(file).parents if _has_cluster(folder)), file)


def rank(group: str) -> int:
    """Its place among all groups; those with the same one keep their order."""
    return LONGEST_FIRST.index(group) if group in LONGEST_FIRST else len(LONGEST_FIRST)


@cache
def _has_cluster(folder: Path) -> bool:
    conftest = _ROOT / folder / "conftest.py"
    return conftest.is_file() and 'scope="package"' in conftest.read_text()
