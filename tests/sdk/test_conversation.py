"""The conversation that every client holds, here against the recording server."""

import uuid

import pytest

from tests.conversation import CLIENTS, hold_conversation

from .recording_server import RecordingServer


@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_keeps_one_session_over_role_switches(
    name: str, server: RecordingServer
) -> None:
    with CLIENTS[name](server.url, uuid.uuid4().hex) as client:
        hold_conversation(client, ("planner", "critic"))
