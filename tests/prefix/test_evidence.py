"""What a difference in the newest messages shows, and what only looks like a break."""

from __future__ import annotations

from typing import Any
from unicodedata import normalize

import pytest

from prefillshare_prefix import Cause, History, find_break
from tests.prefix.talk import called, request, result, said, user

DOCUMENT = user("A long document about many things. " * 20)


@pytest.mark.parametrize(
    "task",
    [
        "Schedule for 2024-01-0{}",
        "[req 123e4567-e89b-12d3-a456-42661417400{}] go",
        "At 10:4{}: " + "what is there to do in town? " * 20,
    ],
)
def test_branches_that_differ_in_a_date_or_an_id_are_no_break(task: str) -> None:
    history = History()
    for number in range(3):
        body = request(DOCUMENT, user(task.format(number)))
        assert history.compare(body) is None
        history.keep(body)


def test_a_date_that_changes_in_an_answered_message_is_named() -> None:
    found = find_break(
        request(DOCUMENT, user("Schedule for 2024-01-01")),
        request(DOCUMENT, user("Schedule for 2024-01-02"), said("Done."), user("And then?")),
    )

    assert found is not None
    assert (found.cause, found.message_index) == (Cause.TIMESTAMP, 1)


def test_a_cleared_tool_result_is_named_though_it_was_the_newest_message() -> None:
    first, second = called("search", {"q": "x"}, "c1"), called("search", {"q": "y"}, "c2")
    long = result("Row after row. " * 40, "c1")
    history = History()
    for body in (request(DOCUMENT), request(DOCUMENT, first, long)):
        assert history.compare(body) is None
        history.keep(body)
    cleared = result("[old result cleared]", "c1")
    found = history.compare(request(DOCUMENT, first, cleared, second, result("Row.", "c2")))

    assert found is not None
    assert (found.cause, found.message_index) == (Cause.MESSAGE_EDITED, 2)


def test_another_result_alone_is_a_branch() -> None:
    call = called("search", {"q": "x"}, "c1")
    before = request(DOCUMENT, call, result("Row after row.", "c1"))

    assert find_break(before, request(DOCUMENT, call, result("Nothing.", "c1"))) is None


TASK = "Task: build a calculator that adds"
PERSONAS = [
    ("You are a tester who writes tests for code. ", "You are a careful planner. "),
    ("You are a tester. Test it.\n\n", "You are a careful planner. Make a plan.\n\n"),
]


@pytest.mark.parametrize(("one", "other"), PERSONAS)
@pytest.mark.parametrize("more", [[], [said("Well."), user("Go on.")]])
def test_two_roles_first_messages_with_one_task_have_the_role_first(
    one: str, other: str, more: list[Any]
) -> None:
    found = find_break(request(user(one + TASK)), request(user(other + TASK), *more))

    assert found is not None
    assert (found.cause, found.message_index) == (Cause.ROLE_PROMPT_FIRST, 0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "You are a helpful assistant. Grade essay 1. Say why in a sentence.",
            "You are a helpful assistant. Grade essay 2. Say why in a sentence.",
        ),
        (
            "You are a tester. Test the calculator. Answer in one sentence.",
            "You are a planner. Plan a trip to the sea and to the hills. Answer in one sentence.",
        ),
        ("You are a poet. Write about rain.", "You are a poet. Write about the sea."),
    ],
)
def test_one_role_s_other_tasks_are_not_roles(one: str, other: str) -> None:
    found = find_break(request(user(one)), request(user(other)))

    assert found is None or found.cause is Cause.UNRELATED


def test_a_control_character_is_escaped_once() -> None:
    found = find_break(
        request(DOCUMENT, user("one\ntwo\tthree, and more"), said("Yes.")),
        request(DOCUMENT, user("one\ntwo three, and more"), said("Yes.")),
    )

    assert found is not None
    assert found.detail.endswith(
        r".content: 'one\ntwo\tthree, and more' became "
        r"'one\ntwo three, and more'"
    )


@pytest.mark.parametrize("rest", ["", " au lait, " * 20, "é" * 90])
def test_excerpts_that_would_look_the_same_are_escaped(rest: str) -> None:
    composed = "Un café" + rest + "."
    found = find_break(
        request(DOCUMENT, user(composed), said("Yes.")),
        request(DOCUMENT, user(normalize("NFD", composed)), said("Yes.")),
    )

    assert found is not None
    assert found.expected.startswith(r"Un caf\xe9")
    assert found.found.startswith(r"Un cafe\u0301")
    plain = find_break(
        request(DOCUMENT, user("Un café"), said("Yes.")),
        request(DOCUMENT, user("Un café noir"), said("Yes.")),
    )
    assert plain is not None
    assert plain.expected == "Un café"
