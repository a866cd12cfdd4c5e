from collections.abc import Iterator

import pytest

from .recording_server import RecordingServer


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    with RecordingServer() as running:
        yield running
