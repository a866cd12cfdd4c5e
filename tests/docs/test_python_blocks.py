"""The Python of the documents runs as it stands there, against a server in this process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from .blocks import DOCUMENTS, ROOT, Block, blocks
from .server import DocsServer

ADDRESS = "http://127.0.0.1:8000/v1"
"""The server's address in every document."""

SHARING = ("README.md", "docs/index.md", "docs/langgraph.md", "docs/guides/")
"""Pages whose programs read everything once; others may show what breaks a prefix."""

PATIENCE = """
from prefillshare_agents.testing import FakeServer

FakeServer.wait_for_chats.__defaults__ = (120.0,)
"""
"""On a busy machine calls may take long to arrive."""

_EXPORT = re.compile(r"^export (\w+)=(?:\"([^\"]*)\"|(\S+))", re.MULTILINE)


def programs() -> dict[str, list[Block]]:
    """Each page with Python, and its blocks: a later block goes on where an earlier one ended."""
    found = {str(page.relative_to(ROOT)): blocks(page) for page in DOCUMENTS}
    return {
        name: [each for each in some if each.language in ("python", "bash")]
        for name, some in found.items()
        if any(each.language == "python" for each in some)
    }


def at_its_line(block: Block, above: int = 0) -> str:
    """A block behind so many lines that errors name the page's, where `above` are there already."""
    return "\n" * (block.line - 1 - above) + block.text


def run_as_tests(blocks: list[Block], folder: Path) -> None:
    """Let pytest run the blocks of a page that shows tests, with the SDK's plugin."""
    source = ""
    for block in blocks:
        source += at_its_line(block, above=source.count("\n")) if block.skip is None else ""
    (folder / "test_page.py").write_text(source)
    (folder / "conftest.py").write_text(PATIENCE)
    plugins = ["-p", "prefillshare_agents.testing.plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, "test_page.py"],
        cwd=folder,
        # The plugin may be installed or not; named here, it must not be found a second time.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore::prefillshare_agents.PrefixBreakWarning")
@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
@pytest.mark.parametrize("page", programs())
def test_the_python_of_a_page_runs(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocks = programs()[page]
    if any("def test_" in block.text for block in blocks):
        run_as_tests([block for block in blocks if block.language == "python"], tmp_path)
        return
    module = ModuleType("documentation_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    with DocsServer() as server:
        for block in blocks:
            if block.skip is not None:
                continue
            if block.language == "bash":
                for name, quoted, plain in _EXPORT.findall(block.text):
                    monkeypatch.setenv(name, (quoted or plain).replace(ADDRESS, server.url))
                continue
            server.script_roles(block.answers)
            source = at_its_line(block).replace(ADDRESS, server.url)
            exec(compile(source, str(ROOT / page), "exec"), module.__dict__)
        server.assert_script_used()
        shown = "".join(block.text for block in blocks if block.language == "python")
        assert server.chats or ADDRESS not in shown
        assert {len(chat.sessions) for chat in server.chats} <= {1}
        if page.startswith(SHARING):
            server.assert_shared()


def test_the_readme_shows_all_three_ways_in() -> None:
    shown = "\n".join(block.text for block in blocks(ROOT / "README.md"))
    assert all(name in shown for name in ("Session(", "Team(", "openai.OpenAI("))
