"""`prefillshare roles` on a cluster that serves."""

import sys
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from prefillshare_server import cli
from tests.lora.test_pool import TASK, TOLERANCE, ask, deviation
from tests.served import Served

pytestmark = pytest.mark.engine

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def roles(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Calls the command in this process: exit code, output, errors."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PREFILLSHARE_URL", f"{served.url}/v1")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["prefillshare", "roles", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def listed(roles: Run) -> dict[str, list[str]]:
    """The lines of the table, by role."""
    code, out, _ = roles("list")
    assert code == 0
    return {line.split()[0]: line.split()[1:] for line in out.splitlines()}


def test_a_role_is_set_listed_and_removed(
    roles: Run,
    client: openai.OpenAI,
    decoders: dict[str, Path],
    new_session: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The adapter may be named from where the user stands, which is not where the router runs."""
    monkeypatch.chdir(decoders["late"].parent)
    assert roles("set", "typed", "late") == (
        0,
        f"typed answers with {decoders['late']} from its next call on\n",
        "",
    )
    assert deviation(ask(client, "typed", TASK, new_session()), decoders, "late") < TOLERANCE
    assert listed(roles)["typed"] == ["lora", str(decoders["late"])]
    assert listed(roles)["critic"] == ["lora", "base"]
    assert roles("remove", "typed") == (0, "removed typed\n", "")
    assert "typed" not in listed(roles)


def test_what_the_router_refuses_is_said(roles: Run, decoders: dict[str, Path]) -> None:
    code, _, err = roles("set", "planner", decoders["base"])
    assert code == 2
    assert "is a full checkpoint, not an adapter" in err
    assert "nothing was changed" in err
    code, _, err = roles("remove", "nobody")
    assert code == 2
    assert "the model 'nobody' does not exist" in err
