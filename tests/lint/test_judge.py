"""Tokens: what is shared, where prompts part, what is lost, what the fixes would give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefillshare_prefix import Cause, Layout, Report
from prefillshare_server.lint.judge import Judge
from prefillshare_server.lint.rendering import Estimate, Exact, Writer
from prefillshare_server.models import store
from tests.prefix.talk import called, request, result, said, system, tool, user

TASK = user("Plan a day in Rome for two people who like to walk. " * 8)
PLAN = said("First the Forum, then lunch, then the Capitol. " * 8)
NEXT = user("Which part takes longest?")


@pytest.fixture(scope="module")
def exact() -> Exact:
    return Exact(store.resolve("tiny-base"), None)


def judged(*requests: dict[str, Any], writer: Writer, layout: Layout = "context_first") -> Report:
    judge = Judge("s", writer, layout)
    for each in requests:
        judge.add(each)
    return judge.report()


@pytest.fixture(params=["exact", "estimate"])
def writer(request: pytest.FixtureRequest) -> Writer:
    return Estimate() if request.param == "estimate" else request.getfixturevalue("exact")


def test_roles_in_turn_share_all_but_their_tails(writer: Writer) -> None:
    report = judged(
        request(system("You plan."), TASK),
        request(system("You criticise."), TASK, PLAN, model="critic"),
        request(system("You plan."), TASK, PLAN, NEXT),
        writer=writer,
    )

    assert report.findings == ()
    first, second, third = report.rows
    assert second.shared_tokens > 0.7 * first.prompt_tokens
    assert third.shared_tokens > 0.9 * second.prompt_tokens
    assert report.fixed_ratio == report.shared_ratio


def test_the_same_roles_share_nothing_where_their_prompts_stand_first(writer: Writer) -> None:
    calls = [
        request(system("You plan."), TASK),
        request(system("As a critic, find faults."), TASK, PLAN, model="critic"),
    ]
    report = judged(*calls, writer=writer, layout="model")
    ideal = judged(*calls, writer=writer)

    (finding,) = report.findings
    assert finding.broken.cause is Cause.ROLE_PROMPT_FIRST
    assert report.shared_ratio < 0.1
    assert finding.lost_tokens == pytest.approx(ideal.shared_tokens, abs=3)
    assert report.fixed_ratio == pytest.approx(ideal.shared_ratio, abs=0.001)


def test_an_edit_loses_what_was_sent_behind_it(writer: Writer) -> None:
    edited = user(str(TASK["content"]).replace("Rome", "Bari", 1))
    report = judged(
        request(TASK, PLAN, NEXT), request(edited, PLAN, NEXT, said("Lunch.")), writer=writer
    )

    (finding,) = report.findings
    before, after = report.rows
    assert finding.token_index == after.shared_tokens
    assert finding.token_index is not None
    assert finding.token_index < before.prompt_tokens / 4
    assert finding.lost_tokens is not None
    assert before.prompt_tokens - 15 < finding.lost_tokens + after.shared_tokens
    assert finding.lost_tokens + after.shared_tokens <= before.prompt_tokens


def test_a_new_message_is_not_counted_as_lost(writer: Writer) -> None:
    talk = [TASK, PLAN, NEXT]
    report = judged(
        request(*talk), request(PLAN, NEXT, user("A long new question. " * 200)), writer=writer
    )

    (finding,) = report.findings
    assert finding.broken.cause is Cause.HISTORY_TRIMMED
    assert finding.lost_tokens is not None
    assert finding.lost_tokens < report.rows[0].prompt_tokens


def test_a_change_that_the_template_does_not_write_is_no_break(exact: Exact) -> None:
    calls = [
        request(TASK, called("search", {"q": "x"}, id), result("none", id), *more)
        for id, more in (("call_1", []), ("call_2", [said("Nothing."), NEXT]))
    ]

    assert judged(*calls, writer=exact).findings == ()
    (finding,) = judged(*calls, writer=Estimate()).findings
    assert finding.broken.cause is Cause.RANDOM_ID


def test_who_spoke_is_said_behind_the_context(writer: Writer) -> None:
    calls = [
        request(TASK, said("A plan.", name="planner"), NEXT),
        request(TASK, said("A plan."), NEXT, said("Lunch."), NEXT),
    ]

    assert judged(*calls, writer=writer).findings == ()
    (finding,) = judged(*calls, writer=Estimate(), layout="model").findings
    assert finding.broken.cause is Cause.NAME_CHANGED


def test_exact_counts_are_those_of_the_router(exact: Exact) -> None:
    tools = [tool("search", q="string")]
    body = request(TASK, called("search", {"q": "x"}), result("none"), tools=tools)
    written = exact.write(body, "context_first")
    fresh = Exact(store.resolve("tiny-base"), None)
    exact.write(request(TASK, PLAN), "context_first")

    assert exact.write(body, "context_first") == written == fresh.write(body, "context_first")
    assert 0 < written.context_tokens < written.tokens


def test_a_template_that_rewrites_earlier_turns_is_blamed(tmp_path: Path) -> None:
    base = store.resolve("tiny-base")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((base / name).read_bytes())
    # As reasoning models' templates do: thoughts only behind the last question.
    (tmp_path / "chat_template.jinja").write_text(
        "{% set ns = namespace(last=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.index0 < ns.last %}"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    thought = said("<think>Forum first.</think>The Forum.")
    report = judged(
        request(TASK, thought, result("open from nine")),
        request(TASK, thought, result("open from nine"), said("Go at nine."), NEXT),
        writer=Exact(tmp_path, None),
    )

    (finding,) = report.findings
    assert (finding.call, finding.broken.cause) == (1, Cause.THINK_STRIPPED)
    assert finding.broken.message_index is None


def test_another_conversation_loses_nothing(writer: Writer) -> None:
    report = judged(request(TASK, PLAN), request(user("What is a monad?")), writer=writer)

    (finding,) = report.findings
    assert (finding.broken.cause, finding.lost_tokens) == (Cause.UNRELATED, 0)
    assert report.breaks == 0


def test_a_child_shares_what_its_parent_had_sent(writer: Writer) -> None:
    parent = Judge("parent", writer, "context_first")
    parent.add(request(TASK, PLAN))
    child = Judge("child", writer, "context_first", parent)
    parent.add(request(TASK, PLAN, NEXT))
    child.add(request(TASK, PLAN, user("Where is lunch?")))
    child.add(request(user("Another task."), PLAN, user("Where is lunch?"), said("Here."), NEXT))

    (finding,) = child.report().findings
    (first, _) = child.report().rows
    assert first.shared_tokens > 0.8 * first.prompt_tokens
    assert (finding.call, finding.previous_call) == (1, 0)
    assert parent.report().calls == 2


def test_a_child_need_not_go_on_from_its_parent(writer: Writer) -> None:
    parent = Judge("parent", writer, "model")
    parent.add(request(system("You plan."), TASK, PLAN))
    child = Judge("child", writer, "model", parent)
    child.add(request(system("You judge."), user("Another task."), PLAN, NEXT))

    assert child.report().findings == ()


def test_a_break_is_told_of_the_call_whose_text_was_expected(writer: Writer) -> None:
    summary = user("Here is a summary of the conversation to date: a walk.")
    report = judged(
        request(TASK, PLAN, NEXT),
        request(user("Sum up what follows, for people who know nothing of it."), model="scribe"),
        request(summary, user("And by bus?")),
        writer=writer,
    )

    assert [finding.broken.cause for finding in report.findings] == [
        "unrelated",
        "history_summarised",
    ]
    assert report.findings[1].previous_call == 0


def test_what_was_sent_as_another_roles_is_lost(writer: Writer) -> None:
    turned = user(PLAN["content"])
    report = judged(request(TASK, turned), request(TASK, PLAN, NEXT), writer=writer)

    [finding] = report.findings
    assert finding.broken.cause is Cause.ROLE_CHANGED
    assert 0 < report.lost_tokens < report.rows[1].prompt_tokens - report.rows[1].shared_tokens
