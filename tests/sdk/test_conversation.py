"""The conversation that every client holds, here against the fake server."""

import uuid

import pytest

from prefillshare_agents.testing import FakeServer
from tests.conversation import CLIENTS, hold_conversation


@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_keeps_one_session_over_role_switches(name: str, server: FakeServer) -> None:
    with CLIENTS[name](server.url, uuid.uuid4().hex) as client:
        hold_conversation(client, ("planner", "critic"))
