"""What `import prefillshare_agents` promises."""

import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import prefillshare_agents
import prefillshare_agents.langgraph

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", [prefillshare_agents, prefillshare_agents.langgraph])
def test_all_lists_exactly_the_public_names(module: ModuleType) -> None:
    public = {
        name
        for name in dir(module)
        if not name.startswith("_") and not isinstance(getattr(module, name), ModuleType)
    }

    assert public == set(module.__all__)


def test_importing_the_sdk_loads_no_model_or_graph_library() -> None:
    program = (
        "import sys, prefillshare_agents\n"
        "heavy = {'torch', 'vllm', 'langchain', 'langchain_core', 'langgraph'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )

    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240
    ).stdout

    assert output.strip() == "[]"


@pytest.mark.parametrize(
    ("missing", "statement"),
    [
        ("langgraph", "import prefillshare_agents.langgraph"),
        ("langchain_openai", "import prefillshare_agents.langgraph"),
        ("langchain", "from prefillshare_agents.langgraph import PrefillShareMiddleware"),
    ],
)
def test_without_langchain_the_import_names_the_extra(missing: str, statement: str) -> None:
    program = f"""
import importlib.abc, sys


class NotInstalled(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, NotInstalled())
{statement}
"""

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240
    )

    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(f"ModuleNotFoundError: prefillshare_agents.langgraph needs {missing}")
    assert last.endswith("install the extra `langgraph`")


def test_every_package_of_the_wheel_is_marked_as_typed(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=240)

    [wheel] = tmp_path.iterdir()
    files = set(zipfile.ZipFile(wheel).namelist())
    packages = {name.partition("/")[0] for name in files if name.count("/") == 1}
    packages = {name for name in packages if f"{name}/__init__.py" in files}
    assert len(packages) == 5
    assert {f"{name}/py.typed" for name in packages} <= files
