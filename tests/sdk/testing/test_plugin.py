"""The pytest plugin, as a user's test suite has it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PLUGIN = "prefillshare_agents.testing.plugin"
ROOT = Path(__file__).parents[3]
USERS_TESTS = '''
import asyncio
import threading

import openai
import pytest


def program(url):
    """Three roles in one conversation."""
    talk = [{"role": "user", "content": "How far is the moon from the earth?"}]
    headers = {"X-Session-ID": "s1"}
    with openai.OpenAI(base_url=url, api_key="k", default_headers=headers) as client:
        for role in ("planner", "critic", "writer"):
            head = {"role": "system", "content": f"You are the {role}."}
            answer = client.chat.completions.create(model=role, messages=[head, *talk])
            talk.append({"role": "assistant", "content": answer.choices[0].message.content})
    return talk[-1]["content"]


def test_it_shares(prefillshare_server):
    prefillshare_server.script("writer", ["384,400 km"])
    assert program(prefillshare_server.url) == "384,400 km"
    prefillshare_server.assert_shared(0.95)
    prefillshare_server.assert_script_used()


@pytest.mark.prefillshare(layout="model")
def test_the_control(prefillshare_server):
    program(prefillshare_server.url)
    prefillshare_server.assert_shared(0.95)


@pytest.mark.prefillshare(layout="model")
def test_the_program_alone(prefillshare_server):
    assert program(prefillshare_server.url) == "an answer by writer"


def test_with_nothing_to_share(prefillshare_server):
    prefillshare_server.fail(400)
    with openai.OpenAI(base_url=prefillshare_server.url, api_key="k", max_retries=0) as client:
        for number in range(3):
            try:
                messages = [{"role": "user", "content": f"{number}. Say something."}]
                client.chat.completions.create(model="planner", messages=messages)
            except openai.BadRequestError:
                pass


def test_a_session(prefillshare_session, prefillshare_server):
    prefillshare_server.script("planner", ["Look it up."])
    prefillshare_session.append({"role": "user", "content": "How far is the moon?"})
    prefillshare_session.chat("planner", instructions="Plan.")
    prefillshare_session.chat("critic", instructions="Judge.")
    assert prefillshare_session.messages[1]["content"] == "Look it up."
    prefillshare_server.assert_shared()
    prefillshare_server.fail(500)  # The end of the test asks for nothing.


async def test_an_async_client(prefillshare_server):
    release = threading.Event()
    prefillshare_server.delay(release)
    async with openai.AsyncOpenAI(base_url=prefillshare_server.url, api_key="k") as client:

        def ask(role):
            messages = [{"role": "user", "content": "x"}]
            session = {"X-Session-ID": "s1"}
            create = client.chat.completions.create
            return create(model=role, messages=messages, extra_headers=session)

        calls = [asyncio.create_task(ask(f"role{i}")) for i in range(8)]
        await asyncio.to_thread(prefillshare_server.wait_for_chats, 8, 60)
        release.set()
        answers = await asyncio.gather(*calls)
    assert len({answer.choices[0].message.content for answer in answers}) == 8
'''


@pytest.fixture
def user(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with tests of a user, where the plugin is loaded under its module's name."""
    # Installed or not, it must not be loaded twice.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini(
        "[pytest]\nasyncio_mode = auto\nfilterwarnings = error\n"
        "asyncio_default_fixture_loop_scope = function\naddopts = --strict-markers"
    )
    pytester.makepyfile(USERS_TESTS)
    return pytester


def run(user: pytest.Pytester, *options: str) -> pytest.RunResult:
    # In a process of its own: pytester would otherwise load modules of openai twice into this one.
    return user.runpytest_subprocess("-p", PLUGIN, "-p", "pytest_asyncio.plugin", *options)


def test_a_users_program_is_tested_and_its_control_fails(user: pytest.Pytester) -> None:
    result = run(user)

    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["E*AssertionError: the calls shared 0.0% of what they could*"])
    # The report ends in the user's own line.
    result.stdout.no_fnmatch_line("*_server.py:*AssertionError")


def test_an_option_asks_every_test_for_a_share(user: pytest.Pytester) -> None:
    result = run(user, "--prefillshare-min-shared=0.95", "-k", "alone or shares or nothing")

    result.assert_outcomes(passed=3, errors=1)


@pytest.mark.parametrize("share", ["95", "-1", "nan", "much"])
def test_a_share_that_is_none_is_refused(user: pytest.Pytester, share: str) -> None:
    result = run(user, f"--prefillshare-min-shared={share}")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*'{share}' is no number from 0 to 1*"])


def test_loading_the_plugin_loads_no_client() -> None:
    program = (
        f"import sys, pytest; before = set(sys.modules); import {PLUGIN}\n"
        "print(sorted({'openai', 'httpx', 'langchain_core', 'pydantic', 'rich'}"
        " & (set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.strip() == "[]"


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert project["entry-points"]["pytest11"] == {"prefillshare": PLUGIN}
