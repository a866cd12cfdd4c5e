"""The site builds without a warning, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .blocks import ROOT

_LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"(?:https?:)?//[^\"]+\"")


def build(site: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does."""
    [command] = re.findall(r"-m (mkdocs build .*)", (ROOT / "Makefile").read_text())
    paths = [str(ROOT), *(str(ROOT / name) for name in ("server", "training", "benchmarks"))]
    return subprocess.run(
        [sys.executable, "-m", *command.split(), "-f", str(config), "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_each_dead_link_is_told_and_ends_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    dead = ("../examples/gone.py", "gone.md", "index.md#gone")
    with (docs / "faq.md").open("a") as page:
        page.writelines(f"\n[A link]({target}).\n" for target in dead)
    # What the file names beside the pages is found from its own folder.
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    config = shutil.copy(ROOT / "mkdocs.yml", tmp_path)

    done = build(tmp_path / "site", Path(config))

    assert done.returncode != 0
    assert f"{len(dead)} warnings in strict mode" in done.stdout + done.stderr
    assert [target for target in dead if target not in done.stdout + done.stderr] == []


def test_the_generated_pages_are_on_the_site(site: Path) -> None:
    wanted = ("cluster-file", "commands", "metrics", "sdk/prefillshare_agents")
    assert all((site / "reference" / name / "index.html").is_file() for name in wanted)
    assert (site / "examples" / "react" / "index.html").is_file()


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    assert {str(page): _LOADED.findall(page.read_text()) for page in pages} == {
        str(page): [] for page in pages
    }


def test_marks_for_the_tests_are_not_shown(site: Path) -> None:
    shown = (site / "guides" / "session" / "index.html").read_text()
    assert "answers:" not in shown
    assert "skip=" not in shown
