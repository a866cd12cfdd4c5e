from collections.abc import Iterator

import pytest

from prefillshare_agents.testing import FakeServer


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    """A fake server; its settings can be given by indirect parameters."""
    with FakeServer(**getattr(request, "param", {})) as running:
        yield running
