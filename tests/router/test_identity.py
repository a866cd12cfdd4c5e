"""Which session a request belongs to."""

import pytest

from prefillshare_server.router.errors import RouterError
from prefillshare_server.router.identity import identify

SPELLINGS: list[tuple[dict[str, str], dict[str, object]]] = [
    ({"x-session-id": "a"}, {}),
    ({"x-prefillshare-session": "b"}, {}),
    ({}, {"session_id": "c"}),
    ({"x-session-affinity": "d"}, {}),
    ({}, {"prompt_cache_key": "e"}),
    ({}, {"metadata": {"session_id": "f"}}),
]


@pytest.mark.parametrize("first", range(len(SPELLINGS)))
def test_the_first_spelling_present_wins(first: int) -> None:
    headers = {name: value for given, _ in SPELLINGS[first:] for name, value in given.items()}
    body = {name: value for _, given in SPELLINGS[first:] for name, value in given.items()}
    assert identify(headers, body).session == "abcdef"[first]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, {}),
        ({"x-request-id": "r"}, {"user": "u"}),
        ({"x-session-id": ""}, {"session_id": None}),
        ({}, {"metadata": {"other": "x"}}),
        ({}, {"metadata": "text"}),
    ],
)
def test_no_session_is_ever_made_up(headers: dict[str, str], body: dict[str, object]) -> None:
    assert identify(headers, body).session is None


def test_an_empty_spelling_counts_as_absent() -> None:
    assert identify({"x-session-id": "", "x-session-affinity": "d"}, {}).session == "d"


@pytest.mark.parametrize("bad", ["x" * 256, "smörgås", "a\x00b", "tab\there"])
def test_an_id_no_header_could_carry_is_refused(bad: str) -> None:
    with pytest.raises(RouterError, match="session_id") as caught:
        identify({}, {"session_id": bad})
    assert caught.value.status == 400
    assert caught.value.param == "session_id"


def test_an_id_of_another_type_is_refused_by_the_name_of_its_field() -> None:
    with pytest.raises(RouterError, match=r"metadata\.session_id must be a string, not int"):
        identify({}, {"metadata": {"session_id": 5}})


def test_the_longest_id_is_taken() -> None:
    assert identify({"x-session-id": "x" * 255}, {}).session == "x" * 255


@pytest.mark.parametrize(("value", "final"), [("true", True), ("1", True), ("false", False)])
def test_a_final_call_says_so(value: str, final: bool) -> None:
    who = identify({"x-session-final": value, "x-parent-session-id": "p"}, {})
    assert who.final is final
    assert who.parent == "p"
