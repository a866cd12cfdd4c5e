"""Workloads as files, their prompts, and how many tokens these are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from prefillshare_bench.traces import (
    Call,
    Context,
    RecordedCall,
    Session,
    Workload,
    read,
    tokens,
    write,
)
from prefillshare_server.errors import ConfigError
from tests.bench.conftest import computed_once, small

ROLES = ("alpha", "beta", "gamma")
CALLS = st.builds(
    Call,
    role=st.sampled_from(ROLES),
    history=st.sampled_from(["main", "other"]),
    new=st.integers(0, 60),
    tail=st.integers(1, 20),
    answer=st.integers(1, 20),
    keep_answer=st.booleans(),
)
SESSIONS = st.builds(
    Session,
    id=st.just("s0"),
    arrival=st.floats(0, 1e6),
    calls=st.lists(CALLS, min_size=1, max_size=8).map(tuple),
)
WORKLOADS = st.builds(
    Workload,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,7}", fullmatch=True),
    seed=st.integers(),
    roles=st.just(ROLES),
    head=st.integers(0, 40),
    about=st.text(max_size=8),
    sessions=st.tuples(SESSIONS),
)
PROPERTY = settings(deadline=None, max_examples=60)


def prompts(workload: Workload) -> list[list[int]]:
    """Of the first session, whose every answer repeats one token."""
    session = workload.sessions[0]
    context, made = Context(workload, session), []
    for index, call in enumerate(session.calls):
        made.append(context.prompt(index))
        context.answered(index, [1000 + index] * call.answer)
    return made


@PROPERTY
@given(workload=WORKLOADS)
def test_a_workload_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, workload: Workload
) -> None:
    path = tmp_path_factory.mktemp("workload") / "w.jsonl"
    write(workload, path)
    assert read(path) == workload


def test_recorded_calls_are_read_as_they_were_written(tmp_path: Path) -> None:
    request = {"messages": [{"role": "user", "content": "Grüße"}], "tools": []}
    call = RecordedCall(role="alpha", request=request, answer=5)
    session = Session(id="s", arrival=0.5, calls=(call,))
    workload = Workload(name="w", roles=("alpha",), sessions=(session,))
    write(workload, tmp_path / "w.jsonl")
    assert read(tmp_path / "w.jsonl") == workload


def test_the_file_has_the_documented_lines(tmp_path: Path) -> None:
    write(small(Call(role="beta", new=5, tail=2, answer=3)), tmp_path / "w.jsonl")
    first, second = map(json.loads, (tmp_path / "w.jsonl").read_text().splitlines())
    assert first == {
        "type": "workload",
        "version": 1,
        "name": "small",
        "seed": 7,
        "roles": ["alpha", "beta"],
        "head": 16,
        "about": "",
    }
    call = {"role": "beta", "history": "main", "new": 5, "tail": 2, "answer": 3}
    assert second == {"type": "session", "id": "s0", "arrival": 0.0, "calls": [call]}


@PROPERTY
@given(workload=WORKLOADS)
def test_a_sessions_prompts_only_grow_within_a_history(workload: Workload) -> None:
    before: dict[str, list[int]] = {}
    for call, prompt in zip(workload.sessions[0].calls, prompts(workload), strict=True):
        assert isinstance(call, Call)
        context = prompt[: -call.tail]
        assert context[: len(before.get(call.history, []))] == before.get(call.history, [])
        before[call.history] = context


@PROPERTY
@given(workload=WORKLOADS)
def test_prompts_are_as_long_as_is_foretold(workload: Workload) -> None:
    lengths = workload.sessions[0].prompt_tokens(workload.head)
    assert lengths == [len(prompt) for prompt in prompts(workload)]


@PROPERTY
@given(workload=WORKLOADS, per_role=st.booleans(), block=st.sampled_from([1, 16]))
def test_tokens_to_compute_are_what_a_cache_that_forgets_nothing_lacks(
    workload: Workload, per_role: bool, block: int
) -> None:
    session = workload.sessions[0]
    caches: dict[str, set[tuple[int, ...]]] = {}
    computed = 0
    for call, prompt in zip(session.calls, prompts(workload), strict=True):
        cache = caches.setdefault(call.role if per_role else "", set())
        found = 0
        while found + block < len(prompt) and tuple(prompt[: found + block]) in cache:
            found += block
        computed += len(prompt) - found
        # A tail is by chance found again only where it begins like what follows the context.
        assert isinstance(call, Call)
        context = len(prompt) - call.tail
        cache |= {tuple(prompt[:end]) for end in range(block, context + 1, block)}
    foretold = session.prefill_tokens(workload.head, per_role=per_role, block_size=block)
    assert foretold is not None
    # What histories have in common by chance is at most a token or two of 230.
    assert 0 <= sum(foretold) - computed <= (2 * len(session.calls) if block == 1 else 0)


def test_tokens_are_drawn_the_same_for_the_same_seed() -> None:
    assert tokens(50, 1, "a") == tokens(50, 1, "a") != tokens(50, 2, "a")
    assert len(set(tokens(2000, 0))) > 200


def test_the_head_is_common_and_the_rest_of_two_sessions_is_not() -> None:
    workload = small(sessions=2)
    one, other = (Context(workload, session).prompt(0) for session in workload.sessions)
    assert one[:16] == other[:16]
    assert one[16:32] != other[16:32]
    assert one[-3:] == other[-3:]


def test_an_answer_that_is_not_kept_is_in_no_later_prompt() -> None:
    workload = small(
        Call(role="alpha", new=5, tail=1, answer=4, keep_answer=False),
        Call(role="beta", new=0, tail=1, answer=4),
    )
    first, second = prompts(workload)
    assert first[:-1] == second[:-1]


def test_the_longest_call_is_a_prompt_with_its_answer() -> None:
    # 16 + 40 + 3 + 4 = 63; 16 + 64 + 2 + 3 = 85 with answer; 16 + 40 + 4 + 20 + 3 + 20 + 3 + 2
    assert small().longest() == 108
    recorded = RecordedCall(role="alpha", request={"messages": []}, answer=1)
    assert small(recorded).longest() is None


def test_each_history_is_computed_once_or_once_per_role() -> None:
    workload = small(sessions=2)
    # 59, then 4 + 20 + 2, then 3 + 20 + 3 of each session.
    assert computed_once(workload) == 2 * (59 + 26 + 26)
    # Beta reads all 82; alpha knows 56 tokens of the 106 of its second prompt.
    assert computed_once(workload, per_role=True) == 2 * (59 + 82 + 50)
    # 48 of the first 56 tokens are whole blocks, 80 of the next 80.
    assert computed_once(workload, block_size=16) == 2 * (59 + 34 + 26)


HEADER = '{"type":"workload","version":1,"name":"w","seed":0,"roles":["a"],"head":0}\n'
CALL = '{"role":"a","history":"main","new":1,"tail":1,"answer":1}'
SESSION = '{"type":"session","id":"s","arrival":0,"calls":[' + CALL + "]}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("{", ":1: "),
        (HEADER.replace('"version":1', '"version":2'), ":1: version: 2: "),
        (HEADER.replace('"head":0', '"haed":0'), ":1: haed"),
        (HEADER, "sessions"),
        (HEADER.replace('"w"', '"a/b"') + SESSION, "name 'a/b' is to be letters"),
        (HEADER.replace('["a"]', '["a","../a"]') + SESSION, "role name '../a' must be"),
        (HEADER.replace('["a"]', '["a","A"]') + SESSION, "role name 'A' must be"),
        (HEADER.replace('["a"]', '["a","a"]') + SESSION, "roles has 'a' twice"),
        (HEADER.replace('["a"]', '["a","base"]') + SESSION, "role 'base' is the name of a part"),
        (HEADER + '{"type":"session","id":"s","arrival":-1,"calls":[' + CALL + "]}", ":2: arrival"),
        (
            HEADER
            + '{"type":"session","id":"s","arrival":0,"calls":['
            + CALL.replace('"new":1', '"new":"x"')
            + "]}",
            ":2: calls.0.new: 'x': ",
        ),
        (
            HEADER
            + '{"type":"session","id":"s","arrival":0,"calls":['
            + CALL.replace('"a"', '"b"')
            + "]}",
            "session 's', call 0: role 'b' is none of the workload's roles ['a']",
        ),
    ],
    ids=[
        *("empty", "json", "version", "unknown", "no sessions", "path", "role path", "capital"),
        *("twice", "reserved", "arrival", "type", "role"),
    ],
)
def test_a_bad_file_is_refused_by_line_and_field(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "w.jsonl").write_text(text)
    with pytest.raises(ConfigError) as error:
        read(tmp_path / "w.jsonl")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("sessions", "said"),
    [
        ([("a", 0), ("a", 1)], "session 'a' is there twice"),
        ([("a", 1), ("b", 0)], "session 'b' arrives at 0.0, before"),
    ],
)
def test_sessions_that_do_not_fit_are_refused(sessions: list[tuple[str, float]], said: str) -> None:
    call = Call(role="r", new=1, tail=0, answer=1)
    with pytest.raises(ValidationError, match=said):
        Workload(
            name="w",
            roles=("r",),
            sessions=tuple(Session(id=i, arrival=at, calls=(call,)) for i, at in sessions),
        )


def test_a_prompt_without_tokens_is_refused() -> None:
    call = Call(role="r", new=0, tail=0, answer=1)
    with pytest.raises(ValidationError, match="call 0: the prompt has no tokens"):
        Workload(name="w", roles=("r",), sessions=(Session(id="s", arrival=0, calls=(call,)),))


def test_the_documented_workload_can_be_read_and_every_field_is_explained(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    [lines] = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "review.jsonl"
    file.write_text(lines)
    workload = read(file)
    assert [call.role for call in workload.sessions[0].calls] == ["coder", "critic"]
    # Written again it is the same, but for what the page leaves out.
    write(workload, file)
    assert read(file) == workload

    [fields] = re.findall(
        r"\| field \| what it is \|\n\| --- \| --- \|\n(.*?)\n\n", page, re.DOTALL
    )
    explained = set(
        re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in fields.split("\n")))
    )
    known = {name for kind in (Workload, Session, Call, RecordedCall) for name in kind.model_fields}
    assert explained == known - {"sessions"}
