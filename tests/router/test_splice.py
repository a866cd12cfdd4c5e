"""An answer in several attempts reads as one, wherever it broke off and however it was chunked."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillshare_server.router.errors import RouterError
from prefillshare_server.router.splice import StreamSplice, WholeSplice

Field = tuple[str, str]
"""Which field of the answer a token's text belongs to, and the text."""

FIELDS = ("content", "reasoning", "name0", "arguments0", "name1", "arguments1")


@st.composite
def answers(draw: st.DrawFn) -> list[Field]:
    """The text of each token, in the order in which fields follow each other in an answer."""
    tokens: list[Field] = []
    for field in ("reasoning", "content", "name0", "arguments0", "name1", "arguments1"):
        if field.startswith("name"):
            texts = draw(st.lists(st.sampled_from(["look", "add"]), max_size=1))
        else:
            # An empty text is a token whose character is not complete yet.
            texts = draw(st.lists(st.sampled_from(["", "a", "ab", "é", "b"]), max_size=6))
        tokens += [(field, text) for text in texts]
    return tokens


def chunk(tokens: Sequence[Field], ids: Sequence[int], attempt: int, **more: Any) -> dict[str, Any]:
    """One chunk as vLLM writes it; tool-call ids are new in every attempt."""
    delta: dict[str, Any] = {}
    for field, text in tokens:
        if not text:
            continue
        if field in ("content", "reasoning"):
            delta[field] = delta.get(field, "") + text
            continue
        kind, index = field[:-1], int(field[-1])
        calls = delta.setdefault("tool_calls", [])
        call = next((each for each in calls if each["index"] == index), None)
        if call is None:
            call = {"index": index, "function": {}}
            calls.append(call)
        if kind == "name":
            call |= {"id": f"call-{index}-of-attempt-{attempt}", "type": "function"}
        call["function"][kind] = call["function"].get(kind, "") + text
    logprobs = {"content": [{"logprob": -float(i)} for i in ids]} if ids else None
    choice = {"index": 0, "delta": delta, "token_ids": list(ids), "logprobs": logprobs}
    return {"choices": [{**choice, "finish_reason": None, **more}]}


def chunks(tokens: list[Field], cuts: Sequence[int], attempt: int) -> Iterator[dict[str, Any]]:
    """The whole answer, a chunk between each two of `cuts`, then its end."""
    first = chunk([], [], attempt)
    first["choices"][0]["delta"] = {"role": "assistant", "content": ""}
    yield first | {"prompt_token_ids": [1, 2]}
    borders = sorted({0, *(cut % (len(tokens) + 1) for cut in cuts), len(tokens)})
    for start, end in pairwise(borders):
        yield chunk(tokens[start:end], range(start, end), attempt)
    yield chunk([], [], attempt, finish_reason="stop")


def read(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a client puts together."""
    said: dict[str, Any] = {"ids": [], "logprobs": [], "roles": 0, "finished": 0, "calls": {}}
    for part in parts:
        [choice] = part["choices"]
        said["ids"] += choice["token_ids"]
        said["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        said["finished"] += choice["finish_reason"] is not None
        delta = choice["delta"]
        said["roles"] += delta.get("role") is not None
        for field in ("content", "reasoning"):
            said[field] = said.get(field, "") + (delta.get(field) or "")
        for call in delta.get("tool_calls", ()):
            kept = said["calls"].setdefault(call["index"], {"name": "", "arguments": "", "ids": []})
            for key in ("name", "arguments"):
                kept[key] += call["function"].get(key) or ""
            kept["ids"] += [call["id"]] if "id" in call else []
    return said


@given(
    answers(),
    st.lists(st.tuples(st.lists(st.integers(0, 40), max_size=20), st.integers(0, 40)), max_size=4),
    st.lists(st.integers(0, 40), max_size=20),
)
def test_what_the_client_reads_is_the_undisturbed_answer(
    tokens: list[Field],
    interrupted: list[tuple[list[int], int]],
    last_cuts: list[int],
) -> None:
    splice = StreamSplice()
    got: list[dict[str, Any]] = []
    for attempt, (cuts, survived) in enumerate(interrupted):
        for part in list(chunks(tokens, cuts, attempt))[:-1][:survived]:
            if (new := splice.take(part)) is not None:
                got.append(new)
        splice.restart(None)
    for part in chunks(tokens, last_cuts, len(interrupted)):
        if (new := splice.take(part)) is not None:
            got.append(new)
    said, undisturbed = read(got), read(list(chunks(tokens, [], 0)))
    ids = [call.pop("ids") for call in said["calls"].values()]
    for call in undisturbed["calls"].values():
        call.pop("ids")
    assert said == undisturbed
    # One id for each call whose name was told, however often the worker made one up.
    assert all(len(each) <= 1 for each in ids)
    assert splice.ids == said["ids"] == list(range(len(tokens)))


def test_an_undisturbed_stream_is_passed_on_as_it_is() -> None:
    tokens = [("content", "a"), ("content", "")]
    splice = StreamSplice()
    for part in chunks(tokens, [1], 0):
        assert splice.take(part) is part


@pytest.mark.parametrize("changed", [("content", "x"), ("arguments0", "x")])
def test_an_attempt_that_contradicts_the_first_is_refused(changed: Field) -> None:
    field, text = changed
    splice = StreamSplice()
    splice.take(chunk([(field, "abc")], [0], 0))
    splice.restart(None)
    with pytest.raises(RouterError, match="does not begin as it did") as refused:
        splice.take(chunk([(field, text)], [0], 1))
    assert (refused.value.status, refused.value.code) == (502, "resume_mismatch")


def test_an_attempt_with_other_tokens_is_refused() -> None:
    splice = StreamSplice()
    splice.take(chunk([("content", "a"), ("content", "b")], [5, 6], 0))
    splice.restart(None)
    with pytest.raises(RouterError, match="token ids"):
        splice.take(chunk([("content", "a")], [7], 1))


@pytest.mark.parametrize("ids", [[0], []], ids=["fewer tokens", "hidden tokens"])
def test_an_attempt_that_ends_before_the_first_did_is_refused(ids: list[int]) -> None:
    splice = StreamSplice()
    splice.take(chunk([("content", "a"), ("content", "b")], [0, 1], 0))
    splice.restart(None)
    with pytest.raises(RouterError, match="does not begin as it did"):
        splice.take(chunk([("content", "a")], ids, 1, finish_reason="stop"))


def completion(text: str, ids: list[int], **more: Any) -> dict[str, Any]:
    logprobs = {
        "tokens": list(text),
        "token_logprobs": [-float(i) for i in ids],
        "text_offset": list(range(len(ids))),
    }
    return {"choices": [{"text": text, "token_ids": ids, "logprobs": logprobs, **more}]}


def test_a_completions_chunk_that_is_half_known_brings_its_other_half() -> None:
    splice = StreamSplice()
    splice.take(completion("ab", [0, 1]))
    splice.restart(None)
    new = splice.take(completion("abcd", [0, 1, 2, 3]))
    assert new is not None
    assert new["choices"] == [
        completion("cd", [2, 3])["choices"][0]
        | {
            "logprobs": {
                "tokens": ["c", "d"],
                "token_logprobs": [-2.0, -3.0],
                "text_offset": [2, 3],
            }
        }
    ]


def test_a_whole_answer_keeps_the_logprobs_of_the_attempt_that_sampled_them() -> None:
    splice = WholeSplice()
    splice.restart(completion("ab", [1, 2], finish_reason="abort"))
    assert splice.ids == [1, 2]
    placeholders = completion("abcd", [1, 2, 3, 4])
    placeholders["choices"][0]["logprobs"]["token_logprobs"][:2] = [0.0, 0.0]
    [choice] = splice.take(placeholders)["choices"]
    assert choice["text"] == "abcd"
    assert choice["logprobs"]["token_logprobs"] == [-1.0, -2.0, -3.0, -4.0]


def test_a_whole_answer_that_broke_off_without_a_word_begins_anew() -> None:
    splice = WholeSplice()
    splice.restart(None)
    answer = completion("ab", [1, 2])
    assert splice.take(answer) is answer


def test_a_whole_answer_that_contradicts_the_one_before_is_refused() -> None:
    splice = WholeSplice()
    splice.restart(completion("ab", [1, 2]))
    with pytest.raises(RouterError, match="token ids"):
        splice.take(completion("xb", [9, 2]))
