"""A session's contexts are kept within bounds, and its branches are no breaks."""

from __future__ import annotations

from typing import Any

import pytest

from prefillshare_prefix import Cause, History
from prefillshare_prefix.compare import divergence
from tests.prefix.talk import called, request, result, said, system, user

TASK = user("Find a train from Rome to Milan.")
PLAN = said("First look up the trains, then compare prices.")
NEXT = user("Which one is cheapest?")


def breaks(*requests: dict[str, Any], layout: Any = "context_first") -> list[Cause | None]:
    """The causes that a session of these requests has, one for each."""
    history = History(layout)
    found = []
    for each in requests:
        broken = history.compare(each)
        found.append(broken.cause if broken else None)
        history.keep(each)
    return found


def test_a_first_request_is_no_break() -> None:
    assert History().compare(request(TASK)) is None


def test_branches_with_answers_of_their_own_and_one_question_are_no_breaks() -> None:
    one = [TASK, said("The answer is 42."), user("Check it.")]
    other = [TASK, said("The answer is 43."), user("Check it.")]

    assert breaks(request(TASK), request(*one), request(*other)) == [None] * 3
    assert (
        breaks(request(TASK), request(*one), request(*one, said("Fine."), NEXT), request(*other))
        == [None] * 4
    )


def test_a_branch_from_a_context_that_is_no_longer_kept_is_no_break() -> None:
    history = History(kept=2)
    plan, check = said("yes"), user("Check it.")
    history.keep(request(TASK))
    long = [TASK, said("no"), check, said("ok"), check, said("ok")]
    for end in (3, 5, 6):
        history.keep(request(*long[:end]))

    assert history.compare(request(TASK, plan, check, check)) is None
    assert history.compare(request(TASK, plan, check, said("ok"), check)) is not None


def test_two_branches_may_make_the_same_call_under_ids_of_their_own() -> None:
    one = [TASK, called("search", {"q": "x"}, "a"), result("none", "a")]
    other = [TASK, called("search", {"q": "x"}, "b"), result("none", "b")]
    more = [*one, said("Nothing found.")]

    assert breaks(request(TASK), request(*one), request(*more, NEXT), request(*other)) == [None] * 4


def test_an_answer_that_was_really_given_makes_a_branch() -> None:
    history = History()
    history.keep(request(TASK), said("Go by train at noon, seat 12."))
    history.keep(request(TASK), said("Go by train at noon, seat 14."))
    history.keep(request(TASK, said("Go by train at noon, seat 12."), NEXT, PLAN, NEXT))
    branch = request(TASK, said("Go by train at noon, seat 14."), NEXT, PLAN, NEXT)
    edited = request(TASK, said("Go by train at noon, seat 99."), NEXT, PLAN, NEXT)

    assert history.compare(branch) is None
    broken = history.compare(edited)
    assert broken is not None
    assert (broken.cause, broken.message_index) == (Cause.MESSAGE_EDITED, 1)


def test_a_break_is_told_once_and_the_new_form_is_gone_on_with() -> None:
    old = [user("It is 10:41. Plan."), PLAN]
    new = [user("It is 10:42. Plan."), PLAN, NEXT]

    assert breaks(request(*old), request(*new), request(*new, PLAN)) == [
        None,
        Cause.TIMESTAMP,
        None,
    ]


def test_a_conversation_trimmed_before_every_call_breaks_every_time() -> None:
    talk = [message for i in range(6) for message in (user(f"question {i}"), said(f"answer {i}"))]
    windows = [request(*talk[max(0, end - 5) : end]) for end in range(3, 12, 2)]

    assert breaks(*windows) == [None, None, *[Cause.HISTORY_TRIMMED] * 3]


def test_a_context_forgotten_by_size_is_found_by_its_longer_ones() -> None:
    history = History()
    talk: list[Any] = []
    for index in range(40):
        talk += [user(f"question {index}"), said(f"answer {index}")]
        history.keep(request(*talk))

    assert len(history) == 16
    assert history.compare(request(*talk[:2], user("a fork from the very beginning"))) is None


def test_equal_messages_are_stored_once() -> None:
    history = History()
    talk: list[Any] = []
    for index in range(16):
        talk.append(user(f"question {index}"))
        history.keep(request(*[dict(message) for message in talk]))

    assert history.stored_messages == 16


def test_a_message_changed_in_place_is_seen() -> None:
    history = History()
    messages = [user("It is 10:41. Plan."), PLAN]
    body = {"messages": messages}
    history.keep(body)
    messages[0]["content"] = "It is 10:42. Plan."

    broken = history.compare(body)

    assert broken is not None
    assert broken.cause is Cause.TIMESTAMP


def test_roles_that_take_turns_are_blamed_once_each_where_their_prompts_stand_first() -> None:
    planner, critic = system("You plan."), system("As a critic, find all mistakes.")
    requests = [
        request(planner, TASK),
        request(critic, TASK, PLAN, model="critic"),
        request(planner, TASK, PLAN, NEXT),
        request(critic, TASK, PLAN, NEXT, PLAN, model="critic"),
    ]

    assert breaks(*requests, layout="model") == [None, Cause.ROLE_PROMPT_FIRST, None, None]
    assert breaks(*requests) == [None] * 4


def test_a_clock_is_found_among_the_prompts_of_other_roles() -> None:
    def planner(time: str) -> dict[str, Any]:
        return system(f"You plan. Current time: {time}")

    requests = [
        request(planner("10:41:00"), TASK),
        request(system("As a critic, find all mistakes."), TASK, PLAN, model="critic"),
        request(planner("10:41:09"), TASK, PLAN, NEXT),
    ]

    assert breaks(*requests, layout="model") == [None, Cause.ROLE_PROMPT_FIRST, Cause.TIMESTAMP]


def test_a_session_that_was_taken_back_starts_anew() -> None:
    history = History()
    history.keep(request(TASK, PLAN, NEXT))
    history.forget()

    assert len(history) == history.stored_messages == 0
    assert history.compare(request(PLAN, NEXT)) is None


def test_a_rewound_session_forgets_what_lies_behind_and_no_more() -> None:
    clock, later = user("It is 10:41. Plan."), user("It is 10:42. Plan.")
    history = History()
    history.keep(request(TASK))
    history.keep(request(TASK, PLAN, clock))
    history.forget(but=request(TASK, PLAN))

    assert len(history) == 1
    assert history.compare(request(TASK, PLAN, later, PLAN, NEXT)) is None
    edited = history.compare(request(user("Find a train from Rome to Bari."), PLAN, NEXT))
    assert edited is not None
    assert (edited.cause, edited.message_index) == (Cause.MESSAGE_EDITED, 0)


def test_an_edit_is_found_among_many_tasks() -> None:
    history = History(kept=64)
    talk = [TASK, PLAN, NEXT]
    history.keep(request(*talk))
    for index in range(60):
        history.keep(request(user(f"Tell me about star {index}.")))

    found = history.compare(request(user("Find a train from Rome to Bari."), PLAN, NEXT, PLAN))

    assert found is not None
    assert (found.cause, found.message_index) == (Cause.MESSAGE_EDITED, 0)


def test_few_of_the_kept_contexts_are_compared_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def counted(earlier: Any, later: Any) -> Any:
        compared.append(earlier)
        return divergence(earlier, later)

    monkeypatch.setattr("prefillshare_prefix.history.divergence", counted)
    history = History(kept=64)
    talk: list[Any] = []
    for index in range(64):
        talk += [user(f"question {index}"), said(f"answer {index}")]
        history.keep(request(*talk))

    assert history.compare(request(user("another first question"), *talk[1:], NEXT)) is not None
    assert history.compare(request(user("another task"))) is not None
    assert len(compared) <= 16


def test_a_debate_written_for_each_agent_from_its_own_side_breaks() -> None:
    said_so = [f"Argument {i}: closing streets helps the air, and shops gain." for i in range(4)]
    history, causes = History(), []
    for turn in range(4):
        turns = [(said if i % 2 == turn % 2 else user)(said_so[i]) for i in range(turn)]
        body = request(TASK, *turns)
        broken = history.compare(body)
        causes.append((broken.cause, broken.message_index) if broken else None)
        history.keep(body, said(said_so[turn]))

    assert causes == [None, None, (Cause.ROLE_CHANGED, 1), (Cause.ROLE_CHANGED, 2)]


def test_text_sent_once_as_another_roles_breaks_once() -> None:
    essay = "Cars bring noise and smoke, and take the room of trees and people."
    history = History()
    talk = [TASK]
    history.keep(request(*talk))
    history.keep(request(TASK, user(essay)))  # a critic, to whom it is the user's
    talk += [said(essay), user("Too short.")]
    broken = history.compare(request(*talk))
    history.keep(request(*talk))
    talk += [said("A longer one, with a line about shops."), user("Better.")]

    assert broken is not None
    assert broken.cause is Cause.ROLE_CHANGED
    assert history.compare(request(*talk)) is None
    assert history.compare(request(TASK, user(essay))) is None


def test_a_few_words_that_both_roles_say_are_no_break() -> None:
    history = History()
    history.keep(request(TASK))
    history.keep(request(TASK, user("Go on."), said("Done.")))

    assert history.compare(request(TASK, said("Go on."), user("Why?"))) is None
