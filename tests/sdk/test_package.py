"""What `import prefillshare_agents` promises."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import prefillshare_agents
import prefillshare_agents.langgraph


@pytest.mark.parametrize("module", [prefillshare_agents, prefillshare_agents.langgraph])
def test_all_lists_exactly_the_public_names(module: ModuleType) -> None:
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }

    assert public == set(module.__all__)


def test_importing_the_sdk_loads_no_model_or_graph_library() -> None:
    program = (
        "import sys, prefillshare_agents\n"
        "heavy = {'torch', 'vllm', 'langchain', 'langchain_core', 'langgraph'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )

    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout

    assert output.strip() == "[]"


def test_the_package_is_marked_as_typed() -> None:
    assert Path(prefillshare_agents.__file__).with_name("py.typed").exists()
