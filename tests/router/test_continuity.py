"""A session's prefix never moves: tokens of a turn stay the tokens they were."""

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from prefillshare_server.config import LayoutSettings
from prefillshare_server.models.layout import Layout
from prefillshare_server.router.ask import Ask, parse
from prefillshare_server.router.handoff import Prompt
from prefillshare_server.router.identity import Identity
from prefillshare_server.router.ledger import Ledger
from prefillshare_server.router.prompt import Prompts
from prefillshare_server.router.sessions import Session
from prefillshare_server.router.tokens import Tokens
from prefillshare_server.router.topology import Decoder
from prefillshare_server.router.turns import Turns
from tests.router.conftest import Bench

SESSION = {"X-Session-ID": "s"}

# Words the tokenizer merges, so that a wrong cut shows; special tokens that users may type.
words = st.lists(
    st.sampled_from(["question", " about", "\n", "  ", "é", "<|im_end|>", "<|im", "tool", " 42"]),
    max_size=6,
).map("".join)
turns = st.lists(
    st.tuples(words, st.sampled_from(["keep", "fork", "edit"])), min_size=1, max_size=6
)


def ask(messages: list[Any], role: str = "alpha") -> Ask:
    body = {"model": role, "messages": messages}
    return Ask(
        "chat",
        body,
        role,
        Decoder(role, role),
        Identity("s", None, False),
        1,
        False,
        False,
        False,
        "id",
    )


@given(turns=turns)
@settings(max_examples=150)
async def test_ids_with_a_ledger_equal_ids_of_the_whole_text(
    base_dir: Path, turns: list[tuple[str, str]]
) -> None:
    tokens = Tokens(base_dir)
    layout = Layout.for_model(base_dir, LayoutSettings())
    prompts = Prompts(layout, tokens, max_model_len=100_000)
    session = Session("s", Ledger(), Turns())
    messages: list[Any] = []
    for text, change in turns:
        if change == "fork" and messages:
            messages = messages[:-1]
        if change == "edit" and messages:
            messages = [{"role": "user", "content": "edited" + text}, *messages[1:]]
        messages = [*messages, {"role": "user", "content": text}]
        [prompt] = await prompts.tokens(ask(messages), session)
        rendered = layout.render(messages)
        tail = rendered.full.removeprefix(rendered.context)
        whole = await tokens.encode(rendered.context) + await tokens.encode(tail)
        assert list(prompt.ids) == whole
        remember(session, prompt)


def remember(session: Session, prompt: Prompt) -> None:
    session.ledger.keep_context(
        prompt.kept, prompt.new_text, prompt.context_ids[prompt.kept_tokens :], "alpha"
    )


async def test_generated_ids_are_spliced_in_when_the_turn_comes_back(bench: Bench) -> None:
    """The answer comes in pieces that the tokenizer would have merged."""
    worker = bench.decode["alpha-0"]
    worker.script = lambda body: ["que", "st", "ion", "s"]
    messages: list[Any] = [{"role": "user", "content": "a question"}]
    _, answer, _ = await bench.chat(headers=SESSION)
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "and then"}]
    body = {"model": "beta", "messages": messages}
    _, second, _ = await bench.post("/v1/chat/completions", body, SESSION)
    assert second["prefillshare"]["break"] is None
    first_ids, second_ids = [request["prompt"] for request in bench.prefill[0].requests]
    encode = bench.cluster.tokenizer.encode
    spoken = [i for piece in ("que", "st", "ion", "s") for i in encode(piece).ids]
    assert spoken != encode("questions").ids
    assert second_ids[: len(first_ids)] == first_ids
    assert second_ids[len(first_ids) : len(first_ids) + len(spoken)] == spoken
    assert bench.cluster.tokenizer.decode(second_ids, skip_special_tokens=False).startswith(
        "<|im_start|>user\na question<|im_end|>\n<|im_start|>assistant\nquestions<|im_end|>\n"
    )


async def test_streamed_answers_are_remembered_as_well(bench: Bench) -> None:
    worker = bench.decode["alpha-0"]
    worker.script = lambda body: ["que", "st", "ion", "s"]
    await bench.stream(headers=SESSION)
    messages = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "questions"},
        {"role": "user", "content": "and then"},
    ]
    await bench.post("/v1/chat/completions", {"model": "beta", "messages": messages}, SESSION)
    first_ids, second_ids = [request["prompt"] for request in bench.prefill[0].requests]
    spoken = [i for p in ("que", "st", "ion", "s") for i in bench.cluster.tokenizer.encode(p).ids]
    assert second_ids[: len(first_ids) + len(spoken)] == first_ids + spoken


async def test_a_turn_cut_by_a_stop_string_is_tokenised_as_text(bench: Bench) -> None:
    """Its ids say more than its text does, so they cannot stand for it."""
    worker = bench.decode["alpha-0"]
    worker.script = lambda body: ["questions", " and then"]
    await bench.chat(headers=SESSION)
    messages = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "questions"},
        {"role": "user", "content": "more"},
    ]
    _, answer, _ = await bench.post(
        "/v1/chat/completions", {"model": "beta", "messages": messages}, SESSION
    )
    assert answer["prefillshare"]["break"] is None
    text = bench.cluster.tokenizer.decode(bench.prefill[0].requests[1]["prompt"])
    assert "and then" not in text


async def test_a_tool_call_comes_back_in_the_bytes_it_was_written_in(bench: Bench) -> None:
    raw = '<tool_call>\n{"name":"weather","arguments":{"city":"Paris"}}\n</tool_call>'
    arguments = '{"city": "Paris"}'
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    worker = bench.decode["alpha-0"]
    worker.script = lambda body: [raw]
    for stream in (False, True):
        worker.tool_calls = [call | {"id": f"c-{stream}"}]
        headers = {"X-Session-ID": f"s-{stream}"}
        if stream:
            events = await bench.stream(headers=headers)
            calls = events[-2]["choices"][0]["delta"]["tool_calls"]
        else:
            _, answer, _ = await bench.chat(headers=headers)
            calls = answer["choices"][0]["message"]["tool_calls"]
        messages = [
            {"role": "user", "content": "a question"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"c-{stream}", "content": "sunny"},
        ]
        body = {"model": "beta", "messages": messages}
        _, second, _ = await bench.post("/v1/chat/completions", body, headers)
        assert second["prefillshare"]["break"] is None
        prompt = bench.prefill[0].requests[-1]["prompt"]
        assert raw in bench.cluster.tokenizer.decode(prompt, skip_special_tokens=False)
        first = bench.prefill[0].requests[-2]["prompt"]
        assert prompt[: len(first)] == first


async def test_a_break_is_reported_and_counted(bench: Bench) -> None:
    long = "another question about numbers and then some words "
    await bench.chat(long * 3, headers=SESSION)
    _, answer, _ = await bench.chat(long + "edited", headers=SESSION)
    broken = answer["prefillshare"]["break"]
    context = bench.cluster.tokenizer.encode
    assert broken["token_index"] >= len(context(f"<|im_start|>user\n{long}".rstrip()).ids)
    assert broken["lost_tokens"] > 0
    assert await bench.metric("prefillshare_prefix_breaks_total") == 1
    _, answer, _ = await bench.chat(long + "edited", headers=SESSION)
    assert answer["prefillshare"]["break"] is None


async def test_a_child_session_may_have_a_context_of_its_own(bench: Bench) -> None:
    await bench.chat("a question", headers={"X-Session-ID": "parent"})
    child = {"X-Session-ID": "child", "X-Parent-Session-ID": "parent"}
    _, answer, _ = await bench.chat("the weather", headers=child)
    assert answer["prefillshare"]["affinity"] == "hit"
    assert answer["prefillshare"]["break"] is None


def test_borders_are_where_special_tokens_begin(base_dir: Path, tokenizer: Tokenizer) -> None:
    tokens = Tokens(base_dir)
    text = "question<|im_end|>\nabout"
    cuts = [position for position in range(len(text) + 1) if tokens.splits_at(text, position)]
    assert cuts == [len("question"), len(text)]
    for cut in cuts:
        assert tokenizer.encode(text[:cut]).ids + tokenizer.encode(text[cut:]).ids == (
            tokenizer.encode(text).ids
        )


def test_parsing_never_changes_the_body() -> None:
    raw = b'{"model": "alpha", "messages": [{"role": "user", "content": "a"}], "n": 2, "x": null}'
    parsed = parse("chat", raw, {}, roles={"alpha": Decoder("alpha", "alpha")}, base_name="base")
    assert parsed.body["x"] is None
    assert parsed.n == 2
