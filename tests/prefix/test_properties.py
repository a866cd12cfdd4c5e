"""What holds for any conversation."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prefillshare_prefix import Cause, History, find_break, text_break

PROPERTY = settings(deadline=None, max_examples=60)
LAYOUTS = st.sampled_from(["context_first", "model"])
ROLES = st.sampled_from(["user", "assistant", "tool"])
# Distinct messages: what comes again by chance is another subject.
WORDS = st.lists(
    st.text("abcdefghij ", min_size=12, max_size=30).filter(str.strip), min_size=12, max_size=24,
    unique=True,
)  # fmt: skip


@st.composite
def talks(draw: st.DrawFn, least: int = 1) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation, and messages that are not in it."""
    texts = draw(WORDS)
    messages = [{"role": draw(ROLES), "content": f"{i} {text}"} for i, text in enumerate(texts)]
    cut = draw(st.integers(least, len(messages) - 4))
    return messages[:cut], messages[cut:]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "tool_calls", "function", "arguments", "name", "id", "type"]
            )
            | st.text(max_size=3),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
FIELDS: dict[str, Any] = {"messages": st.lists(JSON, max_size=5), "tools": JSON, "model": JSON}
BODIES = st.fixed_dictionaries({}, optional=FIELDS) | JSON


@PROPERTY
@given(before=BODIES, after=BODIES, layout=LAYOUTS)
def test_any_json_is_compared_without_an_error(before: Any, after: Any, layout: Any) -> None:
    history = History(layout)
    history.keep(before)
    history.keep(after, after if isinstance(after, dict) else None)
    history.compare(after)
    found = find_break(before, after, layout)
    assert found is None or max(len(found.expected), len(found.found)) <= 80


@PROPERTY
@given(talks(), LAYOUTS, st.data())
def test_appending_is_never_a_break(talk: Any, layout: Any, data: st.DataObject) -> None:
    messages = [*talk[0], *talk[1]]
    history = History(layout)
    end = 0
    while end < len(messages):
        end = data.draw(st.integers(end + 1, len(messages)))
        assert history.compare({"messages": messages[:end]}) is None
        history.keep({"messages": messages[:end]})


@PROPERTY
@given(talks(), LAYOUTS, st.data())
def test_any_beginning_with_new_messages_is_no_break(
    talk: Any, layout: Any, data: st.DataObject
) -> None:
    messages, others = talk
    history = History(layout)
    history.keep({"messages": messages})
    fork = messages[: data.draw(st.integers(1, len(messages)))] + others

    assert history.compare({"messages": fork}) is None
    assert find_break({"messages": messages}, {"messages": fork}, layout) is None


@PROPERTY
@given(talks(), st.data())
def test_parallel_branches_never_break(talk: Any, data: st.DataObject) -> None:
    shared, others = talk
    branches: list[list[Any]] = [[], [], []]
    for message in others:
        branches[data.draw(st.integers(0, 2))].append(message)
    history = History()
    history.keep({"messages": shared})
    sent = [0, 0, 0]
    while any(sent[i] < len(branch) for i, branch in enumerate(branches)):
        left = [i for i, branch in enumerate(branches) if sent[i] < len(branch)]
        index = data.draw(st.sampled_from(left))
        sent[index] += 1
        body = {"messages": [*shared, *branches[index][: sent[index]]]}
        assert history.compare(body) is None
        history.keep(body)


# Few words, so that branches often say the same by chance.
CHATTER = st.sampled_from(["yes", "no", "ok", "42", "Check it.", "Go on."])


@PROPERTY
@given(st.data())
def test_a_tree_of_steps_has_no_break_whatever_is_said_twice(data: st.DataObject) -> None:
    history = History()
    sent: list[list[dict[str, Any]]] = [[{"role": "user", "content": "the task"}]]
    history.keep({"messages": sent[0]})
    for step in range(data.draw(st.integers(1, 20))):
        follows = {"role": "user", "content": data.draw(CHATTER)}
        answer: dict[str, Any] = {"role": "assistant", "content": data.draw(CHATTER)}
        if data.draw(st.booleans()):
            function = {"name": "search", "arguments": "{}"}
            answer = {"role": "assistant", "tool_calls": [{"id": f"c{step}", "function": function}]}
            follows = {"role": "tool", "tool_call_id": f"c{step}", "content": data.draw(CHATTER)}
        messages = [*data.draw(st.sampled_from(sent)), answer, follows]
        assert history.compare({"messages": messages}) is None
        history.keep({"messages": messages})
        sent.append(messages)


@PROPERTY
@given(talks(least=4), st.data())
def test_an_edited_message_is_found_at_its_index(talk: Any, data: st.DataObject) -> None:
    messages, others = talk
    index = data.draw(st.integers(0, len(messages) - 3))
    edited = [dict(message) for message in messages]
    edited[index]["content"] = "what nobody said before"
    history = History()
    history.keep({"messages": messages})

    broken = history.compare({"messages": [*edited, *others[:2]]})

    assert broken is not None
    assert (broken.cause, broken.message_index) == (Cause.MESSAGE_EDITED, index)


@PROPERTY
@given(talks(least=4), st.data())
def test_a_message_put_in_front_of_others_is_found(talk: Any, data: st.DataObject) -> None:
    messages, others = talk
    index = data.draw(st.integers(0, len(messages) - 2))
    later = [*messages[:index], others[0], *messages[index:], others[1]]

    broken = find_break({"messages": messages}, {"messages": later})

    assert broken is not None
    assert (broken.cause, broken.message_index) == (Cause.MESSAGE_INSERTED, index)


@PROPERTY
@given(talks(least=4), st.data())
def test_dropped_messages_are_found(talk: Any, data: st.DataObject) -> None:
    messages, others = talk
    start = data.draw(st.integers(0, len(messages) - 3))
    stop = data.draw(st.integers(start + 1, len(messages) - 2))

    broken = find_break(
        {"messages": messages}, {"messages": [*messages[:start], *messages[stop:], others[0]]}
    )

    assert broken is not None
    assert (broken.cause, broken.message_index) == (Cause.HISTORY_TRIMMED, start)


@PROPERTY
@given(talks(least=3), st.data())
def test_swapped_messages_are_found(talk: Any, data: st.DataObject) -> None:
    messages, others = talk
    index = data.draw(st.integers(0, len(messages) - 2))
    swapped = list(messages)
    swapped[index : index + 2] = [messages[index + 1], messages[index]]

    broken = find_break({"messages": messages}, {"messages": [*swapped, others[0]]})

    assert broken is not None
    assert (broken.cause, broken.message_index) == (Cause.MESSAGES_REORDERED, index)


@PROPERTY
@given(st.lists(talks(), min_size=1, max_size=8))
def test_memory_is_bounded_by_the_kept_contexts(requests: list[Any]) -> None:
    history = History(kept=2)
    for index, (messages, _) in enumerate(requests):
        marked = [{**message, "content": f"{index} {message['content']}"} for message in messages]
        history.keep({"messages": marked})

    assert len(history) <= 2
    assert history.stored_messages <= sum(len(messages) for messages, _ in requests[-2:])


@PROPERTY
@given(st.text(max_size=200), st.text(max_size=200))
def test_any_two_texts_have_a_break(before: str, after: str) -> None:
    broken = text_break(before, after)
    assert max(len(broken.expected), len(broken.found)) <= 80


NAMES = st.text("abcdefghij 0123456789-/:.", min_size=1, max_size=20).filter(str.strip)
AROUND = st.text("abcdefghij ,.", max_size=90)


@PROPERTY
@given(AROUND, st.lists(NAMES, min_size=2, max_size=9, unique=True), AROUND, st.booleans())
def test_tasks_that_are_worded_alike_are_no_loss(
    lead: str, names: list[str], rest: str, shared: bool
) -> None:
    history = History()
    head: list[dict[str, Any]] = [{"role": "user", "content": "a document"}] if shared else []
    for name in names:
        body = {"messages": [*head, {"role": "user", "content": f"{lead} {name} {rest}"}]}
        broken = history.compare(body)
        assert broken is None or not broken.is_loss
        history.keep(body)


@PROPERTY
@given(st.integers(3, 7), st.lists(st.sampled_from(["yes", "no"]), min_size=9, max_size=9))
def test_a_window_over_equal_answers_is_never_called_anything_but_trimmed(
    size: int, answers: list[str]
) -> None:
    history = History()
    talk: list[dict[str, Any]] = []
    for index, answer in enumerate(answers):
        talk.append({"role": "user", "content": f"question {index}"})
        body = {"messages": talk[-size:]}
        broken = history.compare(body)
        assert broken is None or broken.cause in (Cause.HISTORY_TRIMMED, Cause.UNRELATED)
        history.keep(body)
        talk.append({"role": "assistant", "content": answer})
