"""Users' programs are checked strictly: what works passes, what is misspelt does not."""

import subprocess
import sys
from pathlib import Path

import pytest

RIGHT = """
from collections.abc import Iterator
from openai.types.chat import ChatCompletion
from prefillshare_agents import AsyncOpenAI, OpenAI, Session, SessionUsage

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="local", session="s", max_retries=1)
session: Session = client.session("s", token_budget=5, messages=[{"role": "user", "content": "x"}])
answer: ChatCompletion = session.chat("critic", temperature=0)
usage: SessionUsage = session.usage

def texts(stream: bool) -> Iterator[str]:
    result = session.chat("critic", stream=stream)
    if isinstance(result, ChatCompletion):
        yield result.choices[0].message.content or ""
    else:
        for chunk in result:
            yield chunk.choices[0].delta.content or ""

async def ask() -> None:
    async with AsyncOpenAI(api_key="local").session() as block:
        await block.chat("critic")
"""
WRONG = """
from prefillshare_agents import OpenAI, Session

OpenAI(base_ulr="x")
OpenAI(max_retries="three")
OpenAI(on_prefix_break="shout")
OpenAI().session("s", token_budgett=4)
Session().chat()
"""


def test_a_users_program_is_typed_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "right.py", "wrong.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = {line.partition(": error")[0] for line in done.stdout.splitlines() if ": error" in line}

    expected = {n for n, line in enumerate(WRONG.splitlines(), 1) if "(" in line}
    assert lines == {f"wrong.py:{number}" for number in expected}, done.stdout
