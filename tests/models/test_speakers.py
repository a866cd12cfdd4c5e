"""Roles' answers can be told apart behind a context that is the same for all of them."""

from typing import Any

import pytest

from prefillshare_server.models.layout import Layout, context_first
from prefillshare_server.models.speakers import told_apart
from tests.models.chat_templates import NAMES, QWEN3, SMOLLM2

ASK: Any = {"role": "user", "content": "How far is the moon?"}


def said(text: str, name: str | None = None) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return message if name is None else {**message, "name": name}


# A template that prints names, as some do.
PRINTS_NAMES = (
    "{% for m in messages %}<|{{ m.role }}{{ '/' ~ m.name if m.name }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    "template", [SMOLLM2, QWEN3, PRINTS_NAMES], ids=lambda t: NAMES.get(t, "prints_names")
)
def test_names_change_nothing_of_the_context_and_stand_behind_it(template: str) -> None:
    layout = Layout(context_first(template, tail_role="system", shared_head=None), "system")
    named = [ASK, said("Far.", "planner"), said("No.", "critic"), said("Yes.", "critic")]
    bare = [ASK, said("Far."), said("No."), said("Yes.")]
    head = {"role": "system", "content": "Be brief."}

    with_names, without = (layout.render(told_apart([head, *m])) for m in (named, bare))

    assert with_names.context == without.context
    tail = with_names.full.removeprefix(with_names.context)
    assert "Be brief.\n\nAssistant messages so far: 1 planner, 2-3 critic." in tail


def test_without_names_nothing_is_added() -> None:
    messages = [ASK, said("Far."), said("No.")]
    assert told_apart(messages) == messages


def test_answers_without_a_name_are_counted_and_left_out() -> None:
    head, *_ = told_apart([ASK, said("Far."), said("No.", "critic"), said("Yes.")])
    assert head == {"role": "system", "content": "Assistant messages so far: 2 critic."}


def test_the_names_of_users_stay() -> None:
    ada: Any = {"role": "user", "content": "Hello", "name": "ada"}
    assert ada in told_apart([ada, said("Hi.", "planner")])


def test_a_malformed_message_is_named_by_its_own_place() -> None:
    with pytest.raises(ValueError, match=r"messages\[1\]\.content"):
        told_apart([said("Far.", "planner"), {"role": "user", "content": 3}])
