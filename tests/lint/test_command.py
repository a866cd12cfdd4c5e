"""`prefillshare lint` as people and CI run it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import openai
import pytest

from prefillshare_agents.testing import FakeServer
from prefillshare_server.cli import main
from prefillshare_server.models import store
from tests.prefix.talk import Message, request, said, user

TASK, PLAN, NEXT = user("It is 10:41. Plan a day."), said("The Forum."), user("And then?")
CLEAN = [request(TASK), request(TASK, PLAN, NEXT)]
BROKEN = [*CLEAN, request(user("It is 10:42. Plan a day."), PLAN, NEXT, PLAN)]

PROGRAM = """
import sys
import openai
with openai.OpenAI(api_key="local", max_retries=0) as client:
    for time in sys.argv[2:]:
        messages = [{"role": "user", "content": f"It is {time}. Plan" + " a long day" * 30}]
        client.chat.completions.create(model="planner", messages=messages)
print("the program's own words")
sys.exit(int(sys.argv[1]))
"""


MAIN = """
from prefillshare_server.cli import main
from prefillshare_server.lint import recorder

# On a busy machine an answer may be written down long after the program has it.
recorder._SETTLE_S = 60
main()
"""


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def lint(*arguments: str) -> Done:
    """The command in this process: starting one costs a second."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prefillshare", "lint", *arguments])
        patch.setenv("COLUMNS", "120")
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as done:
            main()
    return Done(int(done.value.code or 0), out.getvalue(), err.getvalue())


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "120", **environment},
    )


def linted(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return run([MAIN, "lint", *arguments], **environment)


def trace(folder: Path, requests: list[Message]) -> str:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(body) + "\n" for body in requests))
    return str(path)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def test_a_clean_trace_has_exit_code_0(tmp_path: Path) -> None:
    done = lint(trace(tmp_path, CLEAN), "--max-breaks", "0", "--min-shared", "0.2")

    assert done.returncode == 0, done.stderr
    assert "0 breaks" in done.stdout


def test_a_broken_trace_names_place_cause_and_fix(tmp_path: Path) -> None:
    done = lint(trace(tmp_path, BROKEN))

    assert done.returncode == 0, done.stderr
    assert "call 2 planner: timestamp" in done.stdout
    assert "It is 10:4⟦2⟧. Plan a day." in done.stdout
    assert "Take the time once" in done.stdout
    assert "≈" in done.stdout


@pytest.mark.parametrize("limit", [("--max-breaks", "0"), ("--min-shared", "0.99")])
def test_over_a_limit_the_exit_code_is_1(tmp_path: Path, limit: tuple[str, str]) -> None:
    done = lint(trace(tmp_path, BROKEN), *limit)

    assert done.returncode == 1
    assert "wanted at" in done.stderr


def test_bad_input_has_exit_code_2_and_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"messages": "hello"}\n')
    for arguments, said_why in (
        ([str(path)], "trace.jsonl:1: messages"),
        ([str(tmp_path / "none.jsonl")], "cannot be read"),
        ([str(path), "--url", "http://x/v1"], "several of"),
        (["--max-breaks", "0"], "nothing to look at"),
        (["--"], "no program follows"),
        (["--url", "http://127.0.0.1:9/v1"], "no session is named"),
        (["--url", "http://x:port/v1", "--session", "s"], "no base URL"),
        (["--url", "http:///v1", "--session", "s"], "no base URL"),
        (["--url", "http://[::1/v1", "--session", "s"], "no base URL"),
        (["--url", "http://a b/v1", "--session", "s"], "no router answers there"),
        (["--url", "http://x/v1", "--session", "s", "--base", "b"], "--base: has no meaning with"),
        ([str(path), "--save", "x"], "--save: has no meaning with traces"),
        ([str(path), "--upstream", "http://x"], "--upstream: has no meaning with traces"),
        (["--", "no-such-program-anywhere"], "cannot be run"),
    ):
        done = lint(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), done.stdout
        assert said_why in done.stderr
        assert "Traceback" not in done.stderr


def test_json_has_every_finding(tmp_path: Path) -> None:
    done = lint(trace(tmp_path, BROKEN), "--json", "--layout", "model")

    found = json.loads(done.stdout)
    assert (found["calls"], found["breaks"], found["program_exit_code"]) == (3, 1, None)
    (finding,) = found["sessions"][0]["findings"]
    assert (finding["call"], finding["break"]["cause"]) == (2, "timestamp")


def test_a_program_that_knows_nothing_of_us_is_recorded(tmp_path: Path, server: FakeServer) -> None:
    saved = tmp_path / "saved.jsonl"
    program = [sys.executable, "-c", PROGRAM, "0", "10:41", "10:42"]
    done = linted("--save", str(saved), "--", *program, OPENAI_BASE_URL=server.url)

    assert done.returncode == 0, done.stderr
    assert len(server.chats) == 2
    assert "the program's own words" in done.stdout
    assert "call 1 planner: timestamp" in done.stdout
    assert "exit code 0" in done.stderr
    assert lint(str(saved), "--max-breaks", "0").returncode == 1


def test_our_clients_are_recorded_wherever_they_send_and_once(server: FakeServer) -> None:
    program = (
        "import sys\n"
        "from prefillshare_agents import OpenAI\n"
        "for options in ({}, {'base_url': sys.argv[1]}):\n"
        "    with OpenAI(api_key='local', session='order-1', **options) as client:\n"
        "        messages = [{'role': 'user', 'content': f'Call with {sorted(options)}'}]\n"
        "        client.chat.completions.create(model='planner', messages=messages)\n"
    )
    command = ["--json", "--", sys.executable, "-W", "ignore", "-c", program, server.url]
    done = linted(*command, OPENAI_BASE_URL=server.url)

    found = json.loads(done.stdout)
    assert [(each["session"], each["calls"]) for each in found["sessions"]] == [("order-1", 2)]


def test_a_program_that_forks_its_session_shares_what_the_parent_sent(server: FakeServer) -> None:
    program = (
        "from prefillshare_agents import OpenAI, Session\n"
        "with OpenAI(api_key='local') as client:\n"
        "    parent = Session(client=client)\n"
        "    parent.append({'role': 'user', 'content': 'A long question. ' * 40})\n"
        "    parent.chat('planner')\n"
        "    for number in range(3):\n"
        "        child = parent.fork()\n"
        "        child.append({'role': 'user', 'content': f'Branch {number}'})\n"
        "        child.chat('planner')\n"
    )
    command = ["--json", "--", sys.executable, "-c", program]
    found = json.loads(linted(*command, OPENAI_BASE_URL=server.url).stdout)

    assert len(found["sessions"]) == 4
    shared = [each["shared_ratio"] > 0.5 for each in found["sessions"]]
    assert shared == [False, True, True, True]


def test_a_failed_program_keeps_its_exit_code(server: FakeServer) -> None:
    program = [sys.executable, "-c", PROGRAM, "7", "10:41"]
    done = linted("--json", "--", *program, OPENAI_BASE_URL=server.url)

    assert done.returncode == 7
    assert json.loads(done.stdout)["program_exit_code"] == 7
    assert "the program's own words" in done.stderr


def test_a_program_that_fails_before_its_first_chat_keeps_its_exit_code() -> None:
    done = lint("--min-shared", "0.5", "--", sys.executable, "-c", "raise SystemExit(3)")

    assert done.returncode == 3
    assert "it made no chat request" in done.stderr
    assert "base_url" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_program_is_ended_with_the_command_and_judged(
    tmp_path: Path, server: FakeServer, number: signal.Signals
) -> None:
    saved, scratch = tmp_path / "saved.jsonl", tmp_path / "scratch"
    scratch.mkdir()
    program = PROGRAM.replace("sys.exit", "import signal; print(flush=True); signal.pause(); exit")
    # As in a terminal: `nohup`, under which tests may run, has the signal ignored.
    command = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n" + MAIN
    options = ["lint", "--save", str(saved), "--", sys.executable, "-c", program, "0", "10:41"]
    environment = {**os.environ, "OPENAI_BASE_URL": server.url, "TMPDIR": str(scratch)}
    with subprocess.Popen(
        [sys.executable, "-c", command, *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        out, _ = process.communicate(timeout=120)

    assert process.returncode == 128 + number
    assert "1 call, " in out
    assert len(saved.read_text().splitlines()) == 1
    assert list(scratch.iterdir()) == []


def test_a_running_session_is_reported_as_its_server_counted(server: FakeServer) -> None:
    with openai.OpenAI(base_url=server.url, api_key="local") as client:
        for body in BROKEN:
            client.chat.completions.create(**body, extra_headers={"X-Session-ID": "order-1"})

    done = lint("--url", server.url, "--session", "order-1", "--max-breaks", "0")

    assert done.returncode == 1, done.stderr
    assert "session order-1" in done.stdout
    assert "call 2 planner: timestamp" in done.stdout
    assert "≈" not in done.stdout


def test_a_session_that_is_not_there_is_bad_input(server: FakeServer) -> None:
    done = lint("--url", server.url, "--session", "order-2")
    gone = lint("--url", "http://127.0.0.1:9/v1", "--session", "order-2")

    assert (done.returncode, gone.returncode) == (2, 2)
    assert "order-2" in done.stderr
    assert "no router answers there" in gone.stderr


def test_a_program_that_passes_the_recorder_by_is_told_so() -> None:
    done = lint("--", sys.executable, "-c", "pass")

    assert done.returncode == 2
    assert "the program: made no chat request that was recorded" in done.stderr


def test_a_trace_without_a_chat_request_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    done = lint(str(empty))

    assert done.returncode == 2
    assert "the file has no chat request" in done.stderr
    assert "base_url" not in done.stderr


def test_only_the_sdk_s_dependencies_are_needed(tmp_path: Path) -> None:
    forbidden = (
        "jinja2",
        "tokenizers",
        "yaml",
        "httpx",
        "msgspec",
        "torch",
        "starlette",
        "aiohttp",
    )
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({forbidden!r}))\n"
        "from prefillshare_server.cli import main\n"
        f"sys.argv = ['prefillshare', *{['lint', trace(tmp_path, BROKEN)]!r}]\n"
        "main()"
    )
    done = run([program])

    assert done.returncode == 0, done.stderr
    assert "timestamp" in done.stdout


def test_a_base_without_its_packages_says_what_to_install(tmp_path: Path) -> None:
    base = str(store.resolve("tiny-base"))
    program = (
        "import sys\n"
        "sys.modules['jinja2'] = None\n"
        "from prefillshare_server.cli import main\n"
        f"sys.argv = ['prefillshare', *{['lint', trace(tmp_path, CLEAN), '--base', base]!r}]\n"
        "main()"
    )
    done = run([program])

    assert done.returncode == 2
    assert "install the extra `lint`" in done.stderr
