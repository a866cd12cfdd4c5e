"""Each way of breaking a prefix is found where it is, and named."""

from __future__ import annotations

from typing import Any

import pytest

from prefillshare_prefix import Cause, find_break, text_break
from tests.prefix.talk import called, request, result, said, system, tool, user

TASK = user("Find a train from Rome to Milan.")
PLAN = said("First look up the trains, then compare prices.")
FOUND = result('{"price":29.5,"city":"Forlì"}')
SEARCH = called("search", '{"from":"Rome"}')
NEXT = user("Which one is cheapest?")
ANSWER = said("The one at noon.")
SAME = said("Done.")
RULES = "Answer in one sentence, name your sources, and say so where you are not sure. " * 3

BREAKS: list[tuple[str, list[Any], list[Any], Cause, int]] = [
    (
        "a clock in an earlier message",
        [user("It is 10:41. Plan a day."), PLAN],
        [user("It is 10:42. Plan a day."), PLAN, NEXT],
        Cause.TIMESTAMP,
        0,
    ),
    (
        "an ISO time that a message only had while it was new",
        [TASK, PLAN, user("[2025-03-01T10:41:07Z] Which one?")],
        [TASK, PLAN, user("Which one?"), ANSWER, NEXT],
        Cause.TIMESTAMP,
        2,
    ),
    (
        "a written date",
        [user("Today is Monday, 3 March 2025. Plan."), PLAN],
        [user("Today is Tuesday, 4 March 2025. Plan."), PLAN, NEXT],
        Cause.TIMESTAMP,
        0,
    ),
    (
        "a trailing newline",
        [TASK, said("A plan.\n"), NEXT],
        [TASK, said("A plan."), NEXT, ANSWER],
        Cause.WHITESPACE,
        1,
    ),
    (
        "thoughts taken out of the text",
        [TASK, said("<think>\nhm\n</think>\n\nNoon."), NEXT],
        [TASK, said("Noon."), NEXT, ANSWER, NEXT],
        Cause.THINK_STRIPPED,
        1,
    ),
    (
        "thoughts taken out of their field",
        [TASK, said("Noon.", reasoning="hm"), NEXT],
        [TASK, said("Noon."), NEXT, ANSWER, NEXT],
        Cause.THINK_STRIPPED,
        1,
    ),
    (
        "arguments dumped again",
        [TASK, SEARCH, FOUND],
        [TASK, called("search", '{"from": "Rome"}'), FOUND, ANSWER],
        Cause.ARGUMENTS_REWRITTEN,
        1,
    ),
    (
        "a result dumped again",
        [TASK, SEARCH, FOUND],
        [TASK, SEARCH, result('{"price": 29.5, "city": "Forl\\u00ec"}'), ANSWER, NEXT],
        Cause.ARGUMENTS_REWRITTEN,
        2,
    ),
    (
        "a name written into the text",
        [TASK, said("A plan.", name="planner"), NEXT, ANSWER],
        [
            TASK,
            said("<name>planner</name><content>A plan.</content>", name="planner"),
            NEXT,
            ANSWER,
            NEXT,
        ],
        Cause.NAME_CHANGED,
        1,
    ),
    (
        "ids made anew",
        [TASK, SEARCH, FOUND],
        [
            TASK,
            called("search", '{"from":"Rome"}', "call-9"),
            {**FOUND, "tool_call_id": "call-9"},
            ANSWER,
            NEXT,
        ],
        Cause.RANDOM_ID,
        1,
    ),
    (
        "a run id in the text",
        [user("Run 0b9cf1de-7a53-4b7c-9d0e-6f4f1a0c2d11: plan."), PLAN],
        [user("Run 9d1f2f3a-1111-4b7c-9d0e-aaaaaaaaaaaa: plan."), PLAN, NEXT],
        Cause.RANDOM_ID,
        0,
    ),
    (
        "the first messages trimmed",
        [TASK, PLAN, NEXT, ANSWER, user("And back?")],
        [NEXT, ANSWER, user("And back?"), said("At six."), user("Thanks.")],
        Cause.HISTORY_TRIMMED,
        0,
    ),
    (
        "messages trimmed behind the first",
        [TASK, PLAN, NEXT, ANSWER, user("And back?")],
        [TASK, NEXT, ANSWER, user("And back?"), said("At six."), user("Thanks.")],
        Cause.HISTORY_TRIMMED,
        1,
    ),
    (
        "a summary and the newest messages",
        [TASK, PLAN, NEXT, ANSWER, user("And back?")],
        [user("Here is a summary of the conversation to date: trains."), ANSWER, user("And back?")],
        Cause.HISTORY_SUMMARISED,
        0,
    ),
    (
        "a summary and nothing else",
        [TASK, PLAN, NEXT, ANSWER],
        [user("Summary: the user wants a train."), user("And back?")],
        Cause.HISTORY_SUMMARISED,
        0,
    ),
    (
        "a summary, where one answer is given to everything",
        [TASK, SAME, NEXT, SAME, user("And back?")],
        [user("Here is a summary of the conversation to date: trains."), SAME, user("And then?")],
        Cause.HISTORY_SUMMARISED,
        0,
    ),
    (
        "another agent's answer as the user's turn",
        [TASK, user(PLAN["content"])],
        [TASK, PLAN, NEXT],
        Cause.ROLE_CHANGED,
        1,
    ),
    (
        "a document put in front",
        [TASK, PLAN, NEXT],
        [user("Use these documents: a timetable."), TASK, PLAN, NEXT, ANSWER],
        Cause.MESSAGE_INSERTED,
        0,
    ),
    (
        "two results swapped",
        [TASK, said("", name="a"), result("one", "1"), result("two", "2")],
        [TASK, said("", name="a"), result("two", "2"), result("one", "1"), ANSWER],
        Cause.MESSAGES_REORDERED,
        2,
    ),
    (
        "documents that a question only had while it was new",
        [TASK, PLAN, user("Documents: a timetable.\n\nQuestion: which one is cheapest?")],
        [TASK, PLAN, user("which one is cheapest?"), ANSWER, user("Documents: b\n\nAnd back?")],
        Cause.MESSAGE_EDITED,
        2,
    ),
    (
        "a cleared tool result",
        [TASK, SEARCH, FOUND, ANSWER, NEXT],
        [TASK, SEARCH, result("[cleared]"), ANSWER, NEXT, PLAN],
        Cause.MESSAGE_EDITED,
        2,
    ),
    (
        "instructions of two roles in the first user message",
        [user("You are a planner. Write steps."), TASK],
        [user("You are a strict critic of plans."), TASK, PLAN],
        Cause.ROLE_PROMPT_FIRST,
        0,
    ),
    (
        "lessons added to the task of a new trial",
        [TASK, PLAN, NEXT],
        [user(TASK["content"] + "\nLesson: mind the return.")],
        Cause.UNRELATED,
        0,
    ),
    (
        "a clock at the head of a long prompt that is sent alone",
        [user("It is 10:41. " + RULES)],
        [user("It is 10:42. " + RULES)],
        Cause.TIMESTAMP,
        0,
    ),
    (
        "a date with its time at the head of a long prompt",
        [user("Monday, 3 March 2025, 23:59:07\n" + RULES)],
        [user("Tuesday, 4 March 2025, 00:02:11\n" + RULES)],
        Cause.TIMESTAMP,
        0,
    ),
    (
        "a uuid at the head of a long prompt",
        [user("Run 0b9cf1de-7a53-4b7c-9d0e-6f4f1a0c2d11. " + RULES)],
        [user("Run 9d1f2f3a-1111-4b7c-9d0e-aaaaaaaaaaaa. " + RULES)],
        Cause.RANDOM_ID,
        0,
    ),
    (
        "instructions of two roles in front of a long task",
        [user("You are a planner."), user(RULES)],
        [user("You are a strict critic of all."), user(RULES)],
        Cause.ROLE_PROMPT_FIRST,
        0,
    ),
    (
        "a summary and the last question again",
        [TASK, PLAN, NEXT, ANSWER, user("And back?")],
        [user("Here is a summary of the conversation to date: trains."), user("And back?")],
        Cause.HISTORY_SUMMARISED,
        0,
    ),
    (
        "a document that was replaced in front of an answered question",
        [user("A: trains"), user("Summarise this.")],
        [user("B: buses"), user("Summarise this."), ANSWER],
        Cause.MESSAGE_EDITED,
        0,
    ),
    (
        "a window over equal answers",
        [user("One?"), SAME, user("Two?"), SAME, user("Three?")],
        [user("Two?"), SAME, user("Three?"), SAME, user("Four?")],
        Cause.HISTORY_TRIMMED,
        0,
    ),
    (
        "a message removed before the same answer came again",
        [SAME, user("Two?")],
        [user("Two?"), SAME, user("Three?")],
        Cause.HISTORY_TRIMMED,
        0,
    ),
    (
        "a window that begins with the same answer each time",
        [SAME, user("Two?"), SAME, user("Three?")],
        [SAME, user("Three?"), SAME, user("Four?")],
        Cause.HISTORY_TRIMMED,
        1,
    ),
    (
        "two agents' steps in another order",
        [TASK, SEARCH, FOUND, called("book", "{}", "2"), result("booked", "2")],
        [TASK, called("book", "{}", "2"), result("booked", "2"), SEARCH, FOUND, ANSWER],
        Cause.MESSAGES_REORDERED,
        1,
    ),
    (
        "a question about the conversation, to a summariser",
        [TASK, PLAN, NEXT],
        [user("Summarise this conversation: " + PLAN["content"])],
        Cause.UNRELATED,
        0,
    ),
    ("another conversation", [TASK, PLAN], [user("What is a monad?")], Cause.UNRELATED, 0),
]


@pytest.mark.parametrize(
    ("before", "after", "cause", "index"),
    [row[1:] for row in BREAKS],
    ids=[row[0].replace(" ", "-") for row in BREAKS],
)
def test_a_break_is_named_at_its_message(
    before: list[Any], after: list[Any], cause: Cause, index: int
) -> None:
    found = find_break(request(*before), request(*after))

    assert found is not None
    assert (found.cause, found.message_index) == (cause, index)


@pytest.mark.parametrize(
    ("before", "after", "cause", "index"),
    [row[1:] for row in BREAKS],
    ids=[row[0].replace(" ", "-") for row in BREAKS],
)
def test_the_index_counts_the_leading_system_message(
    before: list[Any], after: list[Any], cause: Cause, index: int
) -> None:
    found = find_break(request(*before), request(system("You plan."), *after))

    assert found is not None
    assert (found.cause, found.message_index) == (cause, index + 1)


def test_a_name_counts_unless_the_layout_says_elsewhere_who_spoke() -> None:
    before = request(TASK, said("A plan.", name="planner"), NEXT)
    after = request(TASK, said("A plan."), NEXT, ANSWER)

    found = find_break(before, after, layout="model")

    assert found is not None
    assert (found.cause, found.message_index) == (Cause.NAME_CHANGED, 1)
    assert found.detail == "messages[1].name: 'planner' became ''"
    assert find_break(before, after) is None


TASKS: list[tuple[str, list[Any], list[Any]]] = [
    ("the jokes of a map-reduce graph", [user("Generate a joke about lions")],
     [user("Generate a joke about elephants")]),
    ("days", [user("Summarise the news of 2024-01-01.")],
     [user("Summarise the news of 2024-01-02.")]),
    ("days in a long prompt", [user("News of 2024-01-01. " + RULES)],
     [user("News of 2024-01-02. " + RULES)]),
    ("days at one time of day", [user("At 10:00 on 2024-01-01. " + RULES)],
     [user("At 10:00 on 2024-01-02. " + RULES)]),
    ("numbers of ten digits", [user("Order 1700000001. " + RULES)],
     [user("Order 1700000002. " + RULES)]),
    ("commits", [user("Review 3f2a9b1c7. " + RULES)], [user("Review 9d1e2f3a1. " + RULES)]),
    ("times of day in a short question", [user("Find a room at 10:00 tomorrow.")],
     [user("Find a room at 11:00 tomorrow.")]),
    ("a uuid at the end", [user(RULES + "Run 0b9cf1de-7a53-4b7c-9d0e-6f4f1a0c2d11")],
     [user(RULES + "Run 9d1f2f3a-1111-4b7c-9d0e-aaaaaaaaaaaa")]),
    ("a task with an addition", [user("Explain how a compiler works")],
     [user("Explain how a compiler works, for children")]),
    ("another first question to a session that was rewound",
     [user("Book a table for two people"), ANSWER], [user("Book a table for four people")]),
    ("two documents and one question", [user("A: " + "trains " * 9), user("Summarise this.")],
     [user("B: " + "buses " * 9), user("Summarise this.")]),
    ("a summariser with a message of instructions", [TASK, PLAN, NEXT],
     [user("Summarise this text in a sentence."), user("The sea is blue.")]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after"),
    [row[1:] for row in TASKS],
    ids=[row[0].replace(" ", "-") for row in TASKS],
)
def test_another_task_of_the_session_is_no_loss(before: list[Any], after: list[Any]) -> None:
    found = find_break(request(*before), request(*after))

    assert found is not None
    assert found.cause is Cause.UNRELATED
    assert not found.is_loss


@pytest.mark.parametrize(
    ("before", "after"),
    [row[1:] for row in TASKS if len(row[1]) == len(row[2])],
    ids=[row[0].replace(" ", "-") for row in TASKS if len(row[1]) == len(row[2])],
)
def test_another_task_behind_what_both_share_is_a_fork(before: list[Any], after: list[Any]) -> None:
    assert find_break(request(TASK, PLAN, *before), request(TASK, PLAN, *after)) is None


NO_BREAKS: list[tuple[str, list[Any], list[Any]]] = [
    ("the same request again", [TASK, PLAN], [TASK, PLAN]),
    ("appended messages", [TASK], [TASK, PLAN, NEXT]),
    ("an earlier state again", [TASK, PLAN, NEXT], [TASK]),
    ("a fork with another question", [TASK, PLAN, NEXT], [TASK, PLAN, user("And back?")]),
    ("a fork with another answer", [TASK, PLAN, NEXT], [TASK, said("By bus."), user("And back?")]),
    ("the last word of an agent instead of its steps", [TASK, SEARCH, FOUND], [TASK, ANSWER, NEXT]),
    ("null, missing and empty fields", [TASK, said(None, refusal=None, tool_calls=[]), NEXT],
     [TASK, said("", audio=None), NEXT]),
    ("text and a list with this text", [TASK, NEXT],
     [user([{"type": "text", "text": TASK["content"]}]), NEXT, ANSWER]),  # type: ignore[arg-type]
    ("an example that was never sent alone", [TASK, user("1+1?")],
     [TASK, user("1+2?"), said("3"), user("2+2?")]),
    ("two spellings of reasoning", [TASK, said("x", reasoning="r"), NEXT],
     [TASK, said("x", reasoning_content="r"), NEXT]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after"),
    [row[1:] for row in NO_BREAKS],
    ids=[row[0].replace(" ", "-") for row in NO_BREAKS],
)
def test_what_goes_on_or_forks_is_no_break(before: list[Any], after: list[Any]) -> None:
    assert find_break(request(*before), request(*after)) is None


HEAD = system("You plan journeys. Be brief and say what is missing.")
TOOLS = [tool("search", city="string", day="string"), tool("book", train="string")]
HEADS = [
    (
        "the prompts of two roles",
        request(HEAD, TASK),
        request(system("You are a critic."), TASK, PLAN, model="critic"),
        Cause.ROLE_PROMPT_FIRST,
    ),
    (
        "two agents on one model",
        request(HEAD, TASK),
        request(system("As a critic, find mistakes."), TASK, PLAN),
        Cause.ROLE_PROMPT_FIRST,
    ),
    (
        "a changed system message",
        request(HEAD, TASK),
        request(system("You plan journeys. Be long and say what is missing."), TASK, PLAN),
        Cause.SYSTEM_CHANGED,
    ),
    (
        "a clock",
        request(system("You plan.\nCurrent time: 2025-03-01T10:41:07"), TASK),
        request(system("You plan.\nCurrent time: 2025-03-01T10:42:11"), TASK, PLAN),
        Cause.TIMESTAMP,
    ),
    (
        "another order of tools",
        request(HEAD, TASK, tools=TOOLS),
        request(HEAD, TASK, PLAN, tools=TOOLS[::-1]),
        Cause.TOOL_ORDER,
    ),
    (
        "another order of fields",
        request(HEAD, TASK, tools=TOOLS),
        request(HEAD, TASK, tools=[tool("search", day="string", city="string"), TOOLS[1]]),
        Cause.TOOL_ORDER,
    ),
    (
        "other tools",
        request(HEAD, TASK, tools=TOOLS),
        request(HEAD, TASK, PLAN, tools=TOOLS[:1]),
        Cause.TOOLS_CHANGED,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [row[1:] for row in HEADS],
    ids=[row[0].replace(" ", "-") for row in HEADS],
)
def test_a_head_that_differs_is_a_break_where_it_stands_first(
    before: dict[str, Any], after: dict[str, Any], cause: Cause
) -> None:
    found = find_break(before, after, layout="model")

    assert found is not None
    assert found.cause is cause
    assert find_break(before, after) is None


def test_an_excerpt_shows_both_sides_of_the_difference() -> None:
    text = "word " * 50
    found = find_break(
        request(user(f"{text}10:41 {text}"), PLAN), request(user(f"{text}10:42 {text}"), PLAN, NEXT)
    )

    assert found is not None
    assert "10:41 word" in found.expected
    assert "10:42 word" in found.found
    assert max(len(found.expected), len(found.found)) <= 80
    assert found.detail.startswith("messages[0].content: '…")


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_has_one_sentence_and_one_remedy(cause: Cause) -> None:
    assert cause.words.endswith(".")
    assert cause.fix.endswith(".")


@pytest.mark.parametrize("piece", ["<think>", "1", "a", "10:41 ", "deadbeef1", "</name>", "[", "{"])
def test_long_texts_take_no_quadratic_time(piece: str) -> None:
    before, after = piece * 200_000, "x" + piece * 200_000
    talk = [TASK, said(before), NEXT, PLAN]

    # A pattern that goes back and forth would take minutes, and end at the timeout.
    assert find_break(request(*talk), request(TASK, said(after), NEXT, PLAN, NEXT)) is not None
    text_break(before, after)
