"""Programs as people write them: each known break is found and named, and none is invented."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

from prefillshare_agents.testing import FakeServer
from prefillshare_prefix import Cause, Layout
from prefillshare_server.lint import recorder, trace
from prefillshare_server.lint.judge import Judge
from prefillshare_server.lint.recorder import recording
from prefillshare_server.lint.rendering import Estimate, Writer
from tests.prefix import programs

NAMES = sorted(module.name for module in pkgutil.iter_modules(programs.__path__))
# langgraph-supervisor 0.0.31 builds on what langgraph has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
LAYOUTS: tuple[Layout, ...] = ("context_first", "model")


@pytest.fixture(scope="module", params=NAMES)
def program(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"{programs.__name__}.{request.param}")


@pytest.fixture(scope="module")
def recorded(program: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the program sent, by way of the recorder that `prefillshare lint -- …` uses."""
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    with (
        pytest.MonkeyPatch.context() as patch,
        FakeServer() as server,
        recording(server.url, path) as url,
    ):
        # Every line counts here, also one that a busy machine writes late.
        patch.setattr(recorder, "_SETTLE_S", 60.0)
        for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
            patch.setenv(name, url)
        patch.setenv("OPENAI_API_KEY", "local")
        answers = program.ANSWERS
        for role, own in answers.items() if isinstance(answers, dict) else [(None, answers)]:
            server.script(role, own) if role else server.script(own)
        program.main()
        server.assert_script_used()
    return path


def breaks(path: Path, writer: Writer, layout: Layout) -> list[tuple[int, Cause]]:
    (lines,) = trace.index([path]).sessions.values()
    judge = Judge(None, writer, layout)
    for call in trace.load(lines):
        judge.add(call.body, call.answer)
    return [(finding.call, finding.broken.cause) for finding in judge.report().findings]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_program_has_exactly_its_known_breaks(
    program: ModuleType, recorded: Path, layout: Layout
) -> None:
    assert breaks(recorded, Estimate(), layout) == program.BREAKS[layout]


def test_some_programs_are_clean_and_most_causes_occur() -> None:
    modules = [importlib.import_module(f"{programs.__name__}.{name}") for name in NAMES]
    clean = [module.__name__ for module in modules if not any(module.BREAKS.values())]
    context_first = [module.__name__ for module in modules if not module.BREAKS["context_first"]]
    causes = {cause for m in modules for found in m.BREAKS.values() for _, cause in found}

    assert len(modules) >= 10
    assert len(clean) >= 2
    assert len(context_first) >= 6
    assert len(causes) >= 11
