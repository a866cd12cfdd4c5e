"""The MOCK language model: any other KV makes other words, and cuts do not matter."""

from pathlib import Path
from random import Random

import pytest

from tests.faults.bench import vocabulary
from tests.mocks.mock_pair_language import (
    BASE,
    Asked,
    Tag,
    Vocabulary,
    Writer,
    base_tags,
    expected_tokens,
    extended,
)
from tests.mocks.mock_pair_text import Deltas, parsed, text_of

pytestmark = pytest.mark.faults

FORMS = ("text", "tools", "json", "reason")
PROMPT = list(range(40, 81))


@pytest.fixture(scope="module")
def words(base_dir: Path) -> Vocabulary:
    return vocabulary(base_dir)


def asked(form: str, *, seed: int = 0, max_tokens: int | None = None) -> Asked:
    return Asked(form, ("weather", "numbers"), seed, max_tokens)


def said(words: Vocabulary, tags: list[Tag], known: list[int], form: str = "text") -> list[int]:
    writer = Writer(words, "alpha", asked(form), tags)
    for token in known:
        writer.append(token)
    while writer.finish_reason is None:
        writer.next()
    return writer.ids


def right_tags() -> list[Tag]:
    return extended(base_tags(PROMPT[:-1]), "alpha", PROMPT[-1:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", ["garbage", "alpha", "missing"])
def test_kv_of_one_position_that_is_not_the_bases_changes_the_answer(
    words: Vocabulary, form: str, wrong: str
) -> None:
    true, _ = expected_tokens(words, "alpha", PROMPT, asked(form))
    for position in range(len(PROMPT) - 1):
        tags = right_tags()
        if wrong == "missing":
            del tags[position]
        elif wrong == "garbage":
            tags[position] = Tag("garbage", 7)
        else:
            tags[position] = extended(tags[:position], "alpha", PROMPT[position : position + 1])[-1]
        assert said(words, tags, [], form) != true


def test_roles_seeds_and_prompts_differ(words: Vocabulary) -> None:
    answers = [
        expected_tokens(words, "alpha", PROMPT, asked("text"))[0],
        expected_tokens(words, "beta", PROMPT, asked("text"))[0],
        expected_tokens(words, "alpha", PROMPT, asked("text", seed=1))[0],
        expected_tokens(words, "alpha", PROMPT[1:], asked("text"))[0],
    ]
    assert len({tuple(answer) for answer in answers}) == len(answers)


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_goes_on_from_every_token_as_if_it_had_not_stopped(
    words: Vocabulary, form: str
) -> None:
    true, _ = expected_tokens(words, "alpha", PROMPT, asked(form))
    for count in range(len(true)):
        assert said(words, right_tags(), true[:count], form) == true


def test_kv_of_the_answer_by_the_base_changes_what_follows(words: Vocabulary) -> None:
    """What a router would get that prefills prompt and answer together to resume."""
    true, _ = expected_tokens(words, "alpha", PROMPT, asked("text"))
    for count in range(1, len(true) - 2):
        whole = [*PROMPT, *true[:count]]
        tags = extended(extended([], BASE, whole[:-1]), "alpha", whole[-1:])
        assert said(words, tags, []) != true[count:]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("most", [1, 2, 5])
def test_however_tokens_are_bundled_the_fields_are_the_same(
    words: Vocabulary, form: str, most: int
) -> None:
    random = Random(most)
    for start in range(30):
        true, _ = expected_tokens(words, "alpha", PROMPT[start % 5 :], asked(form, seed=start))
        deltas, rest = Deltas(words, form, random), true
        content = reasoning = ""
        arguments: dict[int, str] = {}
        names: dict[int, str] = {}
        while rest:
            count = random.randint(1, most)
            delta, rest = deltas.delta(rest[:count]), rest[count:]
            content += delta.get("content", "")
            reasoning += delta.get("reasoning", "")
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                names[call["index"]] = names.get(call["index"], "") + function.get("name", "")
                arguments.setdefault(call["index"], "")
                arguments[call["index"]] += function.get("arguments", "")
        whole = parsed(text_of(words, true), form)
        assert (content, reasoning) == (whole.content, whole.reasoning)
        assert [(names[i], arguments[i]) for i in sorted(names)] == whole.calls


def test_answers_have_characters_that_are_split_across_tokens(words: Vocabulary) -> None:
    """Otherwise splicing inside a character would not be tested at all."""
    split = 0
    for seed in range(20):
        true, _ = expected_tokens(words, "alpha", PROMPT, asked("text", seed=seed))
        for token in true:
            raw = words.bytes_of(token)
            split += len(raw) == 1 and raw[0] > 0x7F
    assert split > 20
