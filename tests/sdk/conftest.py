from collections.abc import Iterator
from typing import Any

import pytest
from openai._base_client import SyncHttpxClientWrapper

from prefillshare_agents import _blocks, _context, _prefix_watch
from prefillshare_agents.testing import FakeServer, _http


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> None:
    """Takes back what an earlier test of the process left: blocks that are open or just ended, as
    all run in one context; and what sessions sent, as servers may get the port of an earlier one.
    """
    _context._entered.set(())
    _context._role.set(None)
    _context._left.set(None)
    _blocks._in_generators.clear()
    _prefix_watch._sessions.clear()


@pytest.fixture(autouse=True)
def nothing_for_other_tests() -> Iterator[None]:
    """Closes the clients that a test leaves open, and lets its servers' threads come to their end.

    The garbage collector may come to a socket before it comes to the client that would close it.
    Its warning is an error then, of whichever test runs at that time.
    """
    made: list[SyncHttpxClientWrapper] = []
    original: Any = SyncHttpxClientWrapper.__init__

    def noted(client: SyncHttpxClientWrapper, *args: Any, **options: Any) -> None:
        original(client, *args, **options)
        made.append(client)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SyncHttpxClientWrapper, "__init__", noted)
        # So long a fake server waits for its threads, which end at once on an idle machine.
        patch.setattr(_http, "_STOP_S", 60.0)
        yield
    for client in made:
        client.close()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    """A fake server; its settings can be given by indirect parameters."""
    with FakeServer(**getattr(request, "param", {})) as running:
        yield running
