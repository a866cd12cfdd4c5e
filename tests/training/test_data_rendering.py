"""What is trained on is what the router sends, id for id."""

import json
import re
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from prefillshare_server.config import LayoutSettings
from prefillshare_server.errors import ConfigError
from prefillshare_server.models import store, tiny
from prefillshare_server.models.layout import Layout
from prefillshare_server.router.ask import Ask
from prefillshare_server.router.identity import Identity
from prefillshare_server.router.ledger import Ledger
from prefillshare_server.router.prompt import Prompts
from prefillshare_server.router.sessions import Session
from prefillshare_server.router.tally import Tally
from prefillshare_server.router.tokens import Tokens
from prefillshare_server.router.topology import Decoder
from prefillshare_server.router.turns import Turns
from prefillshare_training.data.rendering import Renderer
from prefillshare_training.samples import Sample
from tests.models import chat_templates

Messages = list[dict[str, Any]]

SPECIAL = [
    *tiny.SPECIAL_TOKENS,
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
]
CORPUS = [
    "user assistant system tool says yes no the weather in Paris is sunny and the answer is 42",
    '<tool_call>\n{"name": "add", "arguments": {"a": "Paris"}}\n</tool_call>',
    "a question\n\nan answer\n\nanother question about numbers 1 2 3 and then some words\n\n",
] * 20

# The tokenizers merge across these, so that a wrong cut changes ids.
words = st.lists(
    st.sampled_from(
        ["question", " about", "\n", "  ", "é", "日", "<|im", "tool", " 42", "}\n", "\U0001f642"]
    ),
    max_size=5,
).map("".join)
given_words = words | st.just("typed <|im_end|> by a user")
spoken_words = words | st.just("spoken <|im_start|> aloud")
tools = st.none() | st.lists(
    st.sampled_from(["add", "look_up"]).map(
        lambda name: {"type": "function", "function": {"name": name, "parameters": {"ü": 1}}}
    ),
    max_size=2,
)


# Of the role that spoke: the prompt says who did, behind the conversation.
names = st.sampled_from([{}, {"name": "planner"}, {"name": "critic"}])


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    arguments: Any = draw(st.dictionaries(st.sampled_from("ab"), st.integers() | words, max_size=2))
    if draw(st.booleans()):
        arguments = json.dumps(arguments, separators=(",", ":"))
    function = {"name": draw(st.sampled_from(["add", "look_up"])), "arguments": arguments}
    return {"id": draw(st.sampled_from(["c1", "c2", None])), "function": function}


@st.composite
def conversations(draw: st.DrawFn) -> Messages:
    """Any order of speakers behind an optional head, with at least one answer."""
    messages: Messages = []
    if draw(st.booleans()):
        role = draw(st.sampled_from(["system", "developer"]))
        messages.append({"role": role, "content": draw(given_words)})
    messages.append({"role": "user", "content": draw(given_words)})
    kinds = st.sampled_from(["user", "assistant", "call", "tool", "system"])
    for kind in [*draw(st.lists(kinds, max_size=7)), "assistant"]:
        if kind == "call":
            made = draw(st.lists(calls(), min_size=1, max_size=2))
            said = draw(st.none() | spoken_words)
            messages.append(
                {"role": "assistant", "content": said, "tool_calls": made, **draw(names)}
            )
        elif kind == "assistant":
            messages.append({"role": kind, "content": draw(spoken_words), **draw(names)})
        else:
            as_parts = [{"type": "text", "text": draw(given_words)}]
            content = draw(given_words | st.just(as_parts))
            messages.append({"role": kind, "content": content, "tool_call_id": "c1"})
    return messages


def write_base(
    directory: Path, template: str, *, eos: str | None = "<|im_end|>", bos: str | None = None
) -> Path:
    """Tokenizer, template and configuration: all that rendering reads of a base."""
    directory.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos is not None:
        token = (bos, tokenizer.token_to_id(bos))
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [token])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"chat_template": template, "bos_token": bos or "<s>", "eos_token": eos}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base's template over a tokenizer that merges."""
    return write_base(tmp_path_factory.mktemp("bases") / "merging", tiny.CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def renderer(merging: Path) -> Renderer:
    return Renderer.for_base(merging, LayoutSettings())


@cache
def tokenizer_of(base: Path) -> Tokenizer:
    """A base's tokenizer, as its own library reads it."""
    return Tokenizer.from_file(str(base / "tokenizer.json"))


@cache
def tokens_of(base: Path) -> Tokens:
    return Tokens(base)


@cache
def renderer_of(base: Path, layout: LayoutSettings) -> Renderer:
    return Renderer.for_base(base, layout)


def ask(messages: Messages, tools: Any) -> Ask:
    body = {"model": "alpha", "messages": messages, "tools": tools}
    return Ask(
        "chat",
        body,
        "alpha",
        Decoder("alpha", "alpha"),
        Identity("s", None, False),
        1,
        False,
        False,
        False,
        "id",
    )


async def served(
    base: Path, layout: LayoutSettings, messages: Messages, tools: Any, sample: Sample
) -> list[tuple[int, ...]]:
    """The prompts the router sends if every answer is generated as `sample` has it."""
    tokens = tokens_of(base)
    prompts = Prompts(Layout.for_model(base, layout), tokens, max_model_len=1_000_000)
    session = Session("s", Ledger(), Turns())
    generated = iter(turn.completion_ids for turn in sample.turns)
    sent: list[tuple[int, ...]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        [prompt] = await prompts.tokens(ask(messages[:index], tools), session)
        sent.append(tuple(prompt.ids))
        new_ids = prompt.context_ids[prompt.kept_tokens :]
        end = session.ledger.keep_context(prompt.kept, prompt.new_text, new_ids, "alpha")
        tally = Tally()
        for chunk in chunks(base, message, next(generated)):
            tally.add({"choices": [chunk]})
        session.keep_answer(end, prompt.opener, tally, tokens)
    return sent


def chunks(base: Path, message: dict[str, Any], ids: Sequence[int]) -> list[dict[str, Any]]:
    """An answer as vLLM streams it, in two pieces."""
    said: dict[str, Any] = {
        "content": tokenizer_of(base).decode(list(ids), skip_special_tokens=True)
    }
    if made := message.get("tool_calls"):
        said = {"content": message["content"], "tool_calls": [as_answered(call) for call in made]}
    return [
        {"token_ids": ids[:1], "delta": {"role": "assistant"}},
        {"token_ids": ids[1:], "delta": said, "finish_reason": "stop"},
    ]


def as_answered(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if not isinstance(function["arguments"], str):
        text = json.dumps(function["arguments"], ensure_ascii=False)
        function = {**function, "arguments": text}
    return {**call, "function": function}


LAYOUTS = [
    LayoutSettings(),
    LayoutSettings(tail_role="user"),
    LayoutSettings(shared_head="All of us are kind."),
]


@given(messages=conversations(), tools=tools, layout=st.sampled_from(LAYOUTS))
@settings(max_examples=100)
async def test_every_prompt_is_the_one_the_router_sends(
    merging: Path, messages: Messages, tools: Any, layout: LayoutSettings
) -> None:
    sample = renderer_of(merging, layout).conversation(messages, tools)
    sent = await served(merging, layout, messages, tools, sample)
    assert [turn.prompt_ids for turn in sample.turns] == sent


@given(messages=conversations(), tools=tools)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
async def test_every_prompt_is_the_one_the_router_sends_with_smollm2(
    messages: Messages, tools: Any
) -> None:
    base = store.path_of("smollm2-135m-instruct")
    if base is None:
        pytest.skip("smollm2-135m-instruct is not built on this machine")
    sample = renderer_of(base, LayoutSettings()).conversation(messages, tools)
    sent = await served(base, LayoutSettings(), messages, tools, sample)
    assert [turn.prompt_ids for turn in sample.turns] == sent


@given(messages=conversations(), tools=tools, layout=st.sampled_from(LAYOUTS))
@settings(max_examples=30)
async def test_a_prompt_to_be_answered_is_the_one_sent_without_a_session(
    merging: Path, messages: Messages, tools: Any, layout: LayoutSettings
) -> None:
    compiled = Layout.for_model(merging, layout)
    prompts = Prompts(compiled, tokens_of(merging), max_model_len=1_000_000)
    [prompt] = await prompts.tokens(ask(messages[:-1], tools), None)
    assert renderer_of(merging, layout).prompt(messages[:-1], tools) == list(prompt.ids)


async def test_the_models_own_layout_is_served_alike(merging: Path) -> None:
    layout = LayoutSettings(kind="model")
    messages: Messages = [{"role": "system", "content": "Be kind."}, *[USER, ANSWER] * 3]
    sample = Renderer.for_base(merging, layout).conversation(messages)
    sent = await served(merging, layout, messages, None, sample)
    assert [turn.prompt_ids for turn in sample.turns] == sent


def test_tool_calls_that_a_template_leaves_out_are_not_learned_as_nothing(merging: Path) -> None:
    renderer = Renderer.for_base(merging, LayoutSettings(kind="model"))
    calling = {**ANSWER, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    with pytest.raises(ValueError, match=r"^messages\[1\].tool_calls: the chat template writes"):
        renderer.conversation([USER, calling])


def test_an_answer_keeps_its_own_ids_in_later_prompts(renderer: Renderer) -> None:
    """The text alone would be tokenised otherwise: the line ends at its border belong together."""
    messages = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "\nan answer"},
        {"role": "user", "content": "another question"},
        {"role": "assistant", "content": "yes"},
    ]
    first, second = renderer.conversation(messages).turns
    opener = renderer.encode("<|im_start|>assistant\n")
    answered = (*opener, *first.completion_ids)
    assert list(answered) != renderer.encode(renderer.decode(answered))
    spliced = range(len(second.prompt_ids) - len(answered))
    assert any(second.prompt_ids[i : i + len(answered)] == answered for i in spliced)
    assert renderer.decode(second.prompt_ids) == (
        "<|im_start|>system\nYou are a tiny model.<|im_end|>\n"
        "<|im_start|>user\na question<|im_end|>\n"
        "<|im_start|>assistant\n\nan answer<|im_end|>\n"
        "<|im_start|>user\nanother question<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert renderer.decode(second.completion_ids) == "yes<|im_end|>"


def test_instructions_and_tools_stand_behind_the_conversation(renderer: Renderer) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "an answer"},
    ]
    tool = {"type": "function", "function": {"name": "add"}}
    [turn] = renderer.conversation(messages, [tool]).turns
    text = renderer.decode(turn.prompt_ids)
    assert text.index("a question") < text.index("Be kind.") < text.index('{"name": "add"}')
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_a_tool_call_is_learned_as_the_layout_writes_it(renderer: Renderer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
    messages: Messages = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "Well.", "tool_calls": [call]},
    ]
    [turn] = renderer.conversation(messages).turns
    assert renderer.decode(turn.completion_ids) == (
        'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call><|im_end|>'
    )


@pytest.mark.parametrize(
    ("template", "eos", "completion"),
    [
        (chat_templates.QWEN3, "<|im_end|>", "<think>\n\n</think>\n\nan answer<|im_end|>"),
        (chat_templates.LLAMA3, "<|eot_id|>", "an answer<|eot_id|>"),
        (chat_templates.MISTRAL, "</s>", " an answer</s>"),
    ],
    ids=["qwen3", "llama3", "mistral"],
)
async def test_an_answer_is_what_its_template_writes_last(
    tmp_path: Path, template: str, eos: str, completion: str
) -> None:
    base = write_base(tmp_path / "base", template, eos=eos)
    layout = LayoutSettings(tail_role=chat_templates.TAIL_ROLE[template])
    renderer = Renderer.for_base(base, layout)
    messages: Messages = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "an answer"},
    ] * 2
    sample = renderer.conversation(messages)
    assert {renderer.decode(turn.completion_ids) for turn in sample.turns} == {completion}
    assert [turn.prompt_ids for turn in sample.turns] == await served(
        base, layout, messages, None, sample
    )


def test_a_template_may_drop_from_the_next_prompt_what_was_learned(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", chat_templates.QWEN3)
    renderer = Renderer.for_base(base, LayoutSettings())
    messages: Messages = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "an answer"},
    ] * 2
    _, second = renderer.conversation(messages).turns
    assert "<think>" not in renderer.decode(second.prompt_ids)


def test_an_empty_thought_in_the_generation_prompt_is_not_learned(tmp_path: Path) -> None:
    template = tiny.CHAT_TEMPLATE.replace("assistant\\n' }}", "assistant\\n<think></think>' }}")
    renderer = Renderer.for_base(write_base(tmp_path / "base", template), LayoutSettings())
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<b>"}]
    [turn] = renderer.conversation(messages).turns
    assert renderer.decode(turn.prompt_ids).endswith("<think></think>")
    assert renderer.decode(turn.completion_ids) == "<b><|im_end|>"


def test_an_answer_that_its_template_does_not_end_gets_the_end_of_sequence(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    renderer = Renderer.for_base(write_base(tmp_path / "base", template), LayoutSettings())
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    [turn] = renderer.conversation(messages).turns
    assert renderer.decode(turn.completion_ids) == "b\n<|im_end|>"


def test_given_messages_are_context_only(renderer: Renderer) -> None:
    messages = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "another"},
        {"role": "assistant", "content": "no"},
    ]
    everything = renderer.conversation(messages)
    assert renderer.conversation(messages, given=2).turns == everything.turns[1:]


def test_an_opening_answer_is_context_only(renderer: Renderer) -> None:
    messages = [
        {"role": "assistant", "content": "What is it?"},
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "yes"},
    ]
    [turn] = renderer.conversation(messages).turns
    assert renderer.decode(turn.completion_ids) == "yes<|im_end|>"
    assert "What is it?" in renderer.decode(turn.prompt_ids)


def test_instructions_alone_can_be_answered(renderer: Renderer) -> None:
    messages = [
        {"role": "system", "content": "Say yes."},
        {"role": "assistant", "content": "yes"},
    ]
    [turn] = renderer.conversation(messages).turns
    assert renderer.decode(turn.prompt_ids).startswith("<|im_start|>system\nSay yes.")
    assert renderer.decode(turn.completion_ids) == "yes<|im_end|>"


USER = {"role": "user", "content": "a question"}
ANSWER = {"role": "assistant", "content": "an answer"}


@pytest.mark.parametrize(
    ("messages", "tools", "problem"),
    [
        ([], None, "messages: no assistant message answers another one"),
        ([ANSWER], None, "messages: no assistant message answers another one"),
        ("hello", None, "messages: must be a list of messages"),
        ([USER, ANSWER], {"add": 1}, "tools: must be a list of tools"),
        ([{"role": "user", "content": 3}, ANSWER], None, "messages[0].content: 3 is no text"),
        (
            [USER, {"role": "assistant", "content": "yes<|im_end|>no"}],
            None,
            "messages[1].content: '<|im_end|>' in the text would end the answer there",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_field(
    renderer: Renderer, messages: Any, tools: Any, problem: str
) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(problem)):
        renderer.conversation(messages, tools)


def test_a_refusal_of_the_template_names_the_message(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", chat_templates.MISTRAL, eos="</s>")
    renderer = Renderer.for_base(base, LayoutSettings(tail_role="user"))
    with pytest.raises(ValueError, match=r"^messages\[2\]: the chat template refuses"):
        renderer.conversation([USER, ANSWER, ANSWER])


def test_raw_text_ends_with_one_end_of_sequence(renderer: Renderer) -> None:
    [turn] = renderer.text("a question:", " yes").turns
    assert renderer.decode(turn.prompt_ids) == "a question:"
    assert renderer.decode(turn.completion_ids) == " yes<|im_end|>"
    [ended] = renderer.text("a question:", " yes<|im_end|>").turns
    assert ended == turn


def test_raw_prompts_begin_as_a_completions_request_does(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", tiny.CHAT_TEMPLATE, bos="<s>")
    [turn] = Renderer.for_base(base, LayoutSettings()).text("", "yes").turns
    assert Tokens(base).decode(turn.prompt_ids) == "<s>"


@pytest.mark.parametrize(
    ("prompt", "completion", "problem"),
    [
        ("", "yes", "prompt: is empty"),
        ("a", "", "completion: is empty"),
        ("a", "<|im_end|>", "completion: is empty"),
        ("a", "yes<|im_end|>no", "completion: '<|im_end|>' in the text would end the answer"),
    ],
)
def test_raw_text_that_cannot_be_learned_is_refused_by_field(
    renderer: Renderer, prompt: str, completion: str, problem: str
) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(problem)):
        renderer.text(prompt, completion)


def test_generation_stops_where_vllm_stops(merging: Path, tmp_path: Path) -> None:
    base = shutil.copytree(merging, tmp_path / "base")
    im_end = tokenizer_of(base).token_to_id("<|im_end|>")
    assert Renderer.for_base(base, LayoutSettings()).stop_ids == {im_end}
    (base / "config.json").write_text('{"eos_token_id": 1}')
    assert Renderer.for_base(base, LayoutSettings()).stop_ids == {im_end, 1}
    (base / "generation_config.json").write_text('{"eos_token_id": [0, 4]}')
    assert Renderer.for_base(base, LayoutSettings()).stop_ids == {im_end, 0, 4}


def test_a_base_must_have_a_token_that_ends_a_turn(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", tiny.CHAT_TEMPLATE, eos=None)
    with pytest.raises(ConfigError, match="eos_token: there is none"):
        Renderer.for_base(base, LayoutSettings())


def test_the_fingerprint_is_the_layouts(merging: Path, renderer: Renderer) -> None:
    assert renderer.fingerprint == Layout.for_model(merging, LayoutSettings()).fingerprint
