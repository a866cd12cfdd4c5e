"""Layouts of real checkpoints, and that other programs render the template alike."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from prefillshare_server.config import LayoutSettings
from prefillshare_server.errors import ConfigError
from prefillshare_server.models import tiny
from prefillshare_server.models.layout import Layout
from tests.models.chat_strategies import alternating_conversations, free_conversations, heads, tool
from tests.models.chat_templates import LLAMA3, MISTRAL, NAMES, QWEN3, SMOLLM2, TAIL_ROLE


def checkpoint_with(directory: Path, template: str) -> Path:
    (directory / "chat_template.jinja").write_text(template)
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return directory


@pytest.mark.parametrize("template", [SMOLLM2, QWEN3, LLAMA3, MISTRAL], ids=NAMES.get)
@given(data=st.data())
@settings(max_examples=40)
def test_transformers_renders_the_same_text(
    tiny_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    template: str,
    data: Any,
) -> None:
    directory = checkpoint_with(tmp_path_factory.getbasetemp(), template)
    layout = Layout.for_model(directory, LayoutSettings(tail_role=TAIL_ROLE[template]))
    conversation = data.draw(
        alternating_conversations() if template == MISTRAL else free_conversations()
    )
    head, tools = data.draw(heads())
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_models["tiny-base"])
    # vLLM, too, hands arguments to the template as objects.
    parsed = [with_object_arguments(message) for message in head + conversation]

    theirs = tokenizer.apply_chat_template(
        parsed,
        tools=tools or None,
        chat_template=layout.template,
        add_generation_prompt=True,
        tokenize=False,
        bos_token="<s>",
        eos_token="</s>",
    )

    assert layout.render(parsed, tools).full == theirs


def with_object_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    call = message["tool_calls"][0]
    function = {**call["function"], "arguments": {"a": call["function"]["arguments"]}}
    return {**message, "tool_calls": [{**call, "function": function}]}


def test_the_tiny_family_takes_the_layout(tiny_models: dict[str, Path]) -> None:
    layout = Layout.for_model(tiny_models["tiny-base"], LayoutSettings())
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_models["tiny-base"])
    messages = [{"role": "system", "content": "Plan."}, {"role": "user", "content": "Hi"}]

    context, full = layout.render(messages, [tool("add", "Adds.")])

    context_ids, ids = tokenizer.encode(context), tokenizer.encode(full)
    assert context.endswith("<|im_start|>user\nHi<|im_end|>\n")
    assert ids[: len(context_ids)] == context_ids


def test_the_models_own_layout_is_left_alone(tiny_models: dict[str, Path]) -> None:
    layout = Layout.for_model(tiny_models["tiny-base"], LayoutSettings(kind="model"))
    messages = [{"role": "system", "content": "Plan."}, {"role": "user", "content": "Hi"}]

    context, full = layout.render(messages)

    assert layout.template == tiny.CHAT_TEMPLATE
    assert context.startswith("<|im_start|>system\nPlan.<|im_end|>\n")
    assert full == context + "<|im_start|>assistant\n"


def test_a_template_that_refuses_the_tail_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Only user and assistant.*set layout\.tail_role: user"):
        Layout.for_model(checkpoint_with(tmp_path, MISTRAL), LayoutSettings())


def test_a_template_that_drops_the_tail_silently_is_refused(tmp_path: Path) -> None:
    template = (
        "{% for message in messages if message.role != 'system' %}"
        "{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )

    with pytest.raises(ConfigError, match="do not appear in the prompt"):
        Layout.for_model(checkpoint_with(tmp_path, template), LayoutSettings())


def test_a_template_with_a_syntax_error_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not valid Jinja \(line 2: "):
        Layout.for_model(checkpoint_with(tmp_path, "\n{% for %}"), LayoutSettings())


def test_a_base_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template; use an instruction-tuned model"):
        Layout.for_model(tmp_path, LayoutSettings())
