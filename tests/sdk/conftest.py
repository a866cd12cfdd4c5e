from collections.abc import Iterator

import pytest

from prefillshare_agents import _context
from prefillshare_agents.testing import FakeServer


@pytest.fixture(autouse=True)
def behind_no_block() -> None:
    """All tests of a process run in one context: what stands behind a block there is no news."""
    _context._left.set(None)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    """A fake server; its settings can be given by indirect parameters."""
    with FakeServer(**getattr(request, "param", {})) as running:
        yield running
