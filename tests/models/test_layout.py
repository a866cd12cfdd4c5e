"""The context-first layout: one conversation, one prefix, whoever speaks next."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prefillshare_server.models.layout import Layout, context_first
from tests.models.chat_strategies import (
    Message,
    alternating_conversations,
    free_conversations,
    heads,
    texts,
    tool,
    tool_call,
)
from tests.models.chat_templates import (
    LLAMA3,
    MISTRAL,
    NAMES,
    QWEN3,
    SMOLLM2,
    SPECIAL_TOKENS,
    TAIL_ROLE,
)

TEMPLATES = [SMOLLM2, QWEN3, LLAMA3, MISTRAL]
every_template = pytest.mark.parametrize("template", TEMPLATES, ids=NAMES.get)
with_tool_roles = pytest.mark.parametrize("template", [SMOLLM2, QWEN3, LLAMA3], ids=NAMES.get)


def layout_of(template: str, shared_head: str | None = None) -> Layout:
    tail_role = TAIL_ROLE[template]
    source = context_first(template, tail_role=tail_role, shared_head=shared_head)
    return Layout(source, tail_role, SPECIAL_TOKENS)


def conversations(template: str) -> st.SearchStrategy[list[Message]]:
    return alternating_conversations() if template == MISTRAL else free_conversations()


# Without any instructions nothing follows the conversation, and templates that write a last
# message differently from an earlier one may then do so.
nonempty_heads = heads().filter(any)


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


@every_template
@given(data=st.data())
@settings(max_examples=60)
def test_prompts_of_two_roles_share_the_whole_conversation(template: str, data: Any) -> None:
    layout = layout_of(template)
    conversation = data.draw(conversations(template))
    (one, one_tools), (two, two_tools) = data.draw(nonempty_heads), data.draw(nonempty_heads)

    first = layout.render(one + conversation, one_tools)
    second = layout.render(two + conversation, two_tools)

    assert first.context == second.context
    assert last_text(conversation) in first.context


@every_template
@given(data=st.data())
@settings(max_examples=60)
def test_another_message_extends_the_context(template: str, data: Any) -> None:
    layout = layout_of(template)
    conversation = data.draw(conversations(template))
    assume(len(conversation) > 1)
    cut = data.draw(st.integers(min_value=1, max_value=len(conversation) - 1))
    (one, one_tools), (two, two_tools) = data.draw(heads()), data.draw(heads())

    before = layout.render(one + conversation[:cut], one_tools)
    after = layout.render(two + conversation, two_tools)

    assert after.context.startswith(before.context)
    assert after.full.startswith(before.context)


@every_template
def test_the_context_reaches_to_the_end_of_the_conversation(template: str) -> None:
    layout = layout_of(template)

    rendered = layout.render([system("Be brief."), user("Why?"), assistant("Because.")])

    tail = rendered.full.removeprefix(rendered.context)
    assert "Because." in rendered.context
    assert "Because." not in tail
    assert "Be brief." in tail


def test_a_role_without_instructions_shares_what_its_template_lets_it() -> None:
    layout = layout_of(QWEN3)
    conversation = [user("Why?"), assistant("Because.")]

    bare, headed = layout.render(conversation), layout.render([system("Check."), *conversation])

    assert bare.full.startswith(bare.context)
    assert headed.context.startswith(bare.context)
    assert "Why?" in bare.context


def last_text(conversation: list[Message]) -> str:
    content = conversation[-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def test_instructions_and_tools_become_one_final_message() -> None:
    tools = [tool("add", "Adds."), tool("look_up", "Looks <up> & finds.")]

    rendered = layout_of(SMOLLM2).render([system("You plan."), user("Hi")], tools)

    assert rendered.context == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
    )
    assert rendered.full.removeprefix(rendered.context) == (
        "<|im_start|>system\n"
        "You plan.\n\n"
        "# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        "<tools>\n"
        '{"type": "function", "function": {"name": "add", "description": "Adds.", '
        '"parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}\n'
        '{"type": "function", "function": {"name": "look_up", '
        '"description": "Looks <up> & finds.", '
        '"parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}\n'
        "</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n"
        "<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_without_instructions_and_tools_there_is_no_tail() -> None:
    rendered = layout_of(SMOLLM2).render([user("Hi")])

    assert rendered.full == rendered.context + "<|im_start|>assistant\n"


def test_a_blank_system_message_makes_no_tail() -> None:
    layout = layout_of(SMOLLM2)

    assert layout.render([system(" \n"), user("Hi")]) == layout.render([user("Hi")])


def test_only_leading_system_messages_move() -> None:
    messages = [system("One."), system("Two."), user("Hi"), system("Later.")]

    rendered = layout_of(SMOLLM2).render(messages)

    assert rendered.context.endswith("<|im_start|>system\nLater.<|im_end|>\n")
    assert "<|im_start|>system\nOne.\n\nTwo.<|im_end|>\n" in rendered.full


def test_developer_messages_are_system_messages() -> None:
    layout = layout_of(SMOLLM2)
    as_developer = [{"role": "developer", "content": "Plan."}, user("Hi")]

    assert layout.render(as_developer) == layout.render([system("Plan."), user("Hi")])


def test_a_conversation_of_instructions_alone_has_an_empty_context() -> None:
    rendered = layout_of(SMOLLM2).render([system("Begin.")])

    assert rendered.context == ""
    assert rendered.full == "<|im_start|>system\nBegin.<|im_end|>\n<|im_start|>assistant\n"


@given(text=texts)
@settings(max_examples=60)
def test_the_shared_head_opens_every_prompt_exactly_as_written(text: str) -> None:
    head = text + '\n"quoted" \\ {{ x }} %} \N{GRINNING FACE}'

    rendered = layout_of(SMOLLM2, shared_head=head).render([system("Plan."), user("Hi")])

    opening = f"<|im_start|>system\n{head}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert rendered.context == opening


def test_a_user_tail_joins_a_final_user_message() -> None:
    rendered = layout_of(MISTRAL).render([system("Be brief."), user("Why? ")])

    assert rendered.context == "<s> [INST] Why?"
    assert rendered.full == "<s> [INST] Why?\n\nBe brief. [/INST]"


def test_a_user_tail_follows_an_assistant_message() -> None:
    rendered = layout_of(MISTRAL).render([system("Check."), user("Why?"), assistant("So.")])

    assert rendered.context == "<s> [INST] Why? [/INST] So.</s>"
    assert rendered.full == rendered.context + " [INST] Check. [/INST]"


def test_tool_calls_are_written_as_the_model_wrote_them_where_the_template_has_none() -> None:
    call = tool_call("add", {})
    call["function"]["arguments"] = '{"x":1.0, "y":"é"}'
    history = [user("Go"), {"role": "assistant", "content": None, "tool_calls": [call]}]

    rendered = layout_of(SMOLLM2).render(history)

    assert rendered.context.endswith(
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "add", "arguments": {"x":1.0, "y":"é"}}\n</tool_call><|im_end|>\n'
    )


def test_several_tool_calls_follow_the_text_line_by_line() -> None:
    calls = [tool_call("add", {"a": 1}), tool_call("look_up", {})]
    history = [user("Go"), {"role": "assistant", "content": "Sure.", "tool_calls": calls}]

    rendered = layout_of(SMOLLM2).render(history)

    assert rendered.context.endswith(
        "<|im_start|>assistant\nSure.\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call><|im_end|>\n'
    )


def test_a_template_with_tool_calls_keeps_its_own_form() -> None:
    call = tool_call("add", {"a": "1"})
    history = [user("Go"), {"role": "assistant", "content": None, "tool_calls": [call]}]

    rendered = layout_of(LLAMA3).render(history)

    assert '{"name": "add", "parameters": {"a": "1"}}<|eot_id|>' in rendered.context


@pytest.mark.parametrize(
    "arguments", ['{"a": ', "[" * 100_000 + "]" * 100_000], ids=["cut", "deep"]
)
def test_arguments_that_are_no_json_still_render(arguments: str) -> None:
    call = tool_call("add", {})
    call["function"]["arguments"] = arguments
    history = [user("Go"), {"role": "assistant", "content": None, "tool_calls": [call]}]

    rendered = layout_of(LLAMA3).render(history)

    assert f'"parameters": {json.dumps(arguments)}}}' in rendered.context


def test_tool_results_become_user_messages_where_the_template_has_none() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [tool_call("add", {})]}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "4"}

    rendered = layout_of(MISTRAL).render([user("Go"), call, result, assistant("Four.")])

    assert rendered.context.endswith(
        " [INST] <tool_response>\n4\n</tool_response> [/INST] Four.</s>"
    )


@pytest.mark.parametrize("empty", [None, []], ids=["null", "empty list"])
@with_tool_roles
def test_empty_tool_calls_are_as_good_as_none(template: str, empty: list[Any] | None) -> None:
    layout = layout_of(template)
    marked = {**assistant("Yes."), "tool_calls": empty}

    assert layout.render([user("a"), marked, user("b")]) == layout.render(
        [user("a"), assistant("Yes."), user("b")]
    )


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    rendered = layout_of(SMOLLM2).render([{"role": "user", "content": parts}])

    assert rendered.context.endswith("<|im_start|>user\none\ntwo<|im_end|>\n")


def test_template_kwargs_reach_the_template() -> None:
    rendered = layout_of(QWEN3).render([user("Hi")], template_kwargs={"enable_thinking": False})

    assert rendered.full.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages: must not be empty"),
        ([{"content": "x"}], r"messages\[0\].role: None is no role"),
        (["x"], r"messages\[0\]: 'x' is no message"),
        ([user("a"), {"role": "user", "content": 3}], r"messages\[1\].content: 3 is no text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\].content\[0\].type: 'image_url' is not supported",
        ),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
            r"messages\[0\].tool_calls\[0\].function: needs a name",
        ),
    ],
)
def test_malformed_messages_are_refused_by_field(messages: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        layout_of(SMOLLM2).render(messages)


def test_a_refusal_of_the_template_is_passed_on() -> None:
    with pytest.raises(ValueError, match="refuses this conversation: conversation roles must"):
        layout_of(MISTRAL).render([user("a"), assistant("b"), assistant("c")])


def test_template_kwargs_cannot_replace_the_conversation() -> None:
    with pytest.raises(ValueError, match="'messages' cannot be set"):
        layout_of(SMOLLM2).render([user("a")], template_kwargs={"messages": []})


def test_the_fingerprint_tells_layouts_apart() -> None:
    plain, headed = layout_of(SMOLLM2), layout_of(SMOLLM2, shared_head="Team.")

    assert plain.fingerprint == layout_of(SMOLLM2).fingerprint
    assert plain.fingerprint != headed.fingerprint


def test_rendering_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from prefillshare_server.models.layout import Layout, context_first\n"
        f"Layout(context_first({SMOLLM2!r})).render([{{'role': 'user', 'content': 'a'}}])\n"
        "sys.exit(bool({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
