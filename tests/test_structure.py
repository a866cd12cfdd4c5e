"""The code base keeps the shape its documents describe."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "prefillshare_agents": ROOT,
    "prefillshare_prefix": ROOT,
    "prefillshare_server": ROOT / "server",
    "prefillshare_training": ROOT / "training",
    "prefillshare_bench": ROOT / "benchmarks",
}
LONGEST_FILE = 400
MODULES = [
    path
    for package, folder in PACKAGES.items()
    for path in sorted((folder / package).rglob("*.py"))
    if path.name != "__init__.py"
]


def test_structures_names_every_module() -> None:
    described = (ROOT / "docs" / "structures.md").read_text()
    roots = tuple(folder / package for package, folder in PACKAGES.items())
    names = [str(path.relative_to(next(r for r in roots if r in path.parents))) for path in MODULES]
    assert [name for name in names if f"`{name}`" not in described] == []


def test_structures_names_no_module_that_is_gone() -> None:
    described = (ROOT / "docs" / "structures.md").read_text()
    named = {part for part in described.split("`") if part.endswith(".py") and " " not in part}
    roots = [ROOT, *(folder / package for package, folder in PACKAGES.items())]
    assert [name for name in sorted(named) if not any((r / name).exists() for r in roots)] == []


def test_every_file_fits_in_a_head() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in MODULES}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_every_test_that_guarantees_names_exists() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`(tests/[\w/]+)(?:\.py)?(?:::(\w+))?`", text)
    assert len(named) > 20
    missing = []
    for path, test in named:
        file = ROOT / f"{path}.py"
        if not (ROOT / path).is_dir() and (
            not file.is_file() or (test and f"def {test}(" not in file.read_text())
        ):
            missing.append((path, test))
    assert not missing


DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/*/*.md", "docs/results/*.json")
    for path in ROOT.glob(pattern)
)


def test_every_make_target_that_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (path.name, target)
        for path in DOCUMENTS
        for target in re.findall(r"(?:`|^|time )make ([a-z-]+)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 10
    assert {pair for pair in named if pair[1] not in targets} == set()


def test_every_program_that_documents_name_exists() -> None:
    named = {
        (path.name, module)
        for path in DOCUMENTS
        for module in re.findall(r"python -m ([a-z_.]+[a-z_])", path.read_text())
    }
    assert len(named) > 5
    assert {pair for pair in named if importlib.util.find_spec(pair[1]) is None} == set()
