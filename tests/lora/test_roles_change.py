"""Roles come, change and go while the cluster serves: no call fails, none mixes two adapters."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.adapters import write_adapter
from tests.lora.test_pool import TASK, TOLERANCE, ask, deviation
from tests.served import Served

pytestmark = pytest.mark.engine


@pytest.fixture
def roles(served: Served) -> Iterator[httpx.Client]:
    """HTTP on the router; the roles that a test adds are gone after it."""
    with httpx.Client(base_url=f"{served.url}/v1", timeout=240) as http:
        before = {card["id"] for card in http.get("roles").json()["data"]}
        yield http
        for card in http.get("roles").json()["data"]:
            if card["id"] not in before:
                http.delete(f"roles/{card['id']}")


def put(roles: httpx.Client, name: str, adapter: Path, **options: Any) -> httpx.Response:
    return roles.put(f"roles/{name}", json={"adapter": str(adapter), **options})


def test_a_role_is_added_and_removed(
    roles: httpx.Client,
    client: openai.OpenAI,
    decoders: dict[str, Path],
    new_session: Callable[[], str],
) -> None:
    answer = put(roles, "late", decoders["late"])
    assert answer.status_code == 200, answer.text
    assert answer.json()["pool"] == "lora"
    assert "late" in {model.id for model in client.models.list()}
    assert deviation(ask(client, "late", TASK, new_session()), decoders, "late") < TOLERANCE
    assert roles.delete("roles/late").json() == {
        "id": "late",
        "object": "prefillshare.role.deleted",
        "deleted": True,
    }
    with pytest.raises(openai.NotFoundError, match="the model 'late' does not exist"):
        ask(client, "late", TASK, new_session())
    assert roles.delete("roles/late").status_code == 404


def test_a_replaced_adapter_answers_from_the_next_call_on(
    roles: httpx.Client,
    client: openai.OpenAI,
    decoders: dict[str, Path],
    new_session: Callable[[], str],
) -> None:
    """Also in a session whose blocks the old one has read."""
    session = new_session()
    put(roles, "changing", decoders["late"])
    before = ask(client, "changing", TASK, session)
    put(roles, "changing", decoders["solver"])
    after = ask(client, "changing", TASK, session)
    assert deviation(before, decoders, "late") < TOLERANCE
    assert deviation(after, decoders, "solver") < TOLERANCE


def test_what_is_served_does_not_change_with_the_folder(
    roles: httpx.Client,
    client: openai.OpenAI,
    decoders: dict[str, Path],
    new_session: Callable[[], str],
    tmp_path: Path,
) -> None:
    """Training again into the same folder changes nothing until the role is set again."""
    folder = write_adapter(decoders["base"], tmp_path / "mine", seed=8)
    put(roles, "mine", folder)
    first = ask(client, "mine", TASK, new_session())
    write_adapter(decoders["base"], folder, seed=9)
    second = ask(client, "mine", TASK, new_session())
    put(roles, "mine", folder)
    third = ask(client, "mine", TASK, new_session())
    said = [answer.choices[0].message.content for answer in (first, second, third)]
    assert said[0] == said[1] != said[2]


@pytest.mark.exactness
def test_no_call_fails_or_mixes_while_a_role_changes(
    roles: httpx.Client,
    client: openai.OpenAI,
    decoders: dict[str, Path],
    new_session: Callable[[], str],
) -> None:
    """Calls run all the time; each answer is wholly that of one of the two adapters."""
    adapters = ("late", "solver")
    put(roles, "changing", decoders[adapters[0]])
    answers, failures, done = [], [], threading.Event()

    def call_on() -> None:
        while not done.is_set():
            try:
                answers.append(ask(client, "changing", TASK, new_session()))
            except openai.OpenAIError as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=call_on) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for change in range(6):
            assert put(roles, "changing", decoders[adapters[change % 2]]).status_code == 200
            # One more than are under way: at least one of these calls began after the change.
            enough = len(answers) + len(threads) + 1
            while len(answers) < enough and not failures:
                done.wait(0.05)
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    assert not failures
    spoke = {
        min(adapters, key=lambda name: deviation(answer, decoders, name)) for answer in answers
    }
    assert spoke == set(adapters)
    for answer in answers:
        assert min(deviation(answer, decoders, name) for name in adapters) < TOLERANCE


def test_what_cannot_be_served_is_said_and_changes_nothing(
    roles: httpx.Client, colocated: bool, decoders: dict[str, Path], tmp_path: Path
) -> None:
    base_dir = decoders["base"]
    wide = write_adapter(base_dir, tmp_path / "wide", rank=32)
    dora = write_adapter(base_dir, tmp_path / "dora", use_dora=True)
    cases = [
        ("planner", wide, 400, "has rank 32, these workers take ranks up to 16"),
        ("planner", dora, 400, "use_dora is True; set merge: true for the role"),
        ("planner", tmp_path / "gone", 400, "there is no such directory"),
        ("planner", base_dir, 400, "is a full checkpoint, not an adapter"),
        ("base", decoders["late"], 400, "'base' cannot be a role's name"),
        ("Big", decoders["late"], 400, "'Big' cannot be a role's name"),
    ]
    if not colocated:
        cases.append(("judge", decoders["late"], 409, "role 'judge' has workers of its own"))
    before = roles.get("roles").json()
    for name, adapter, status, message in cases:
        answer = put(roles, name, adapter)
        assert answer.status_code == status, answer.text
        assert message in answer.json()["error"]["message"]
    for body, param in [(b"{}", "adapter"), (b"[", None), (b'{"adapter": "a", "x": 1}', "x")]:
        answer = roles.put("roles/planner", content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
    assert roles.get("roles").json() == before
