from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from prefillshare_agents.langgraph import Team
from prefillshare_agents.testing import FakeServer

ROLES = ["planner", "solver", "coder", "critic"]

# `make test-oldest` has the oldest openai and LangGraph, and none of the packages around them.
if find_spec("langchain") is None:
    collect_ignore = [
        "test_concurrency.py",
        "test_metadata.py",
        "test_middleware.py",
        "test_restart.py",
        "test_shapes.py",
        "test_sharing.py",
        "test_supervisor.py",
    ]


@pytest.fixture
def team(server: FakeServer) -> Iterator[Team]:
    made = Team(server.url, ROLES)
    yield made
    made.close()
