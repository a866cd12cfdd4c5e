"""The README's Python runs as it stands there, and its calls belong to one session."""

import re
from pathlib import Path

import pytest

from .recording_server import RecordingServer

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```python\n(.+?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_shows_all_three_ways_in() -> None:
    shown = "\n".join(BLOCKS)
    assert all(name in shown for name in ("Session(", "Team(", "openai.OpenAI("))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split()[1])
def test_a_block_of_the_readme_runs(block: str, server: RecordingServer) -> None:
    assert "http://127.0.0.1:8000/v1" in block
    exec(block.replace("http://127.0.0.1:8000/v1", server.url), {})
    sessions = [session for chat in server.chats for session in chat.sessions]
    assert len(sessions) == len(server.chats) > 0
    assert len(set(sessions)) == 1
