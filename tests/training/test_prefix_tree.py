"""A row holds every turn as it is served, and every shared prompt token once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefillshare_training import prefix_tree
from prefillshare_training.collator import pack
from prefillshare_training.samples import Sample, Turn

# Few token ids, so that prompts share beginnings often.
ids = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)
sample_lists = st.lists(
    st.lists(st.builds(Turn, ids, ids), min_size=1, max_size=4).map(lambda t: Sample(tuple(t))),
    min_size=1,
    max_size=4,
)


def _seen_by(row: prefix_tree.Row, index: int) -> list[tuple[int, int]]:
    """(position, token) of everything decoder token `index` attends to, by position."""
    tokens = [*row.base_ids.tolist(), *row.decoder_ids.tolist()]
    positions = [*row.base_positions.tolist(), *row.decoder_positions.tolist()]
    seen = [at for at, visible in enumerate(row.decoder_mask[index]) if visible]
    return sorted((positions[at], tokens[at]) for at in seen)


@given(sample_lists)
def test_each_decoder_token_sees_exactly_its_own_turn_so_far(samples: list[Sample]) -> None:
    row = prefix_tree.row(samples)
    at = 0
    for turn in (turn for sample in samples for turn in sample.turns):
        sequence = turn.prompt_ids + turn.completion_ids
        for offset, target in enumerate(turn.completion_ids):
            end = len(turn.prompt_ids) + offset
            assert _seen_by(row, at) == list(enumerate(sequence[:end]))
            assert row.labels[at] == target
            at += 1
    assert at == len(row.labels)


@given(sample_lists)
def test_the_base_computes_all_of_a_prompt_but_its_last_token(samples: list[Sample]) -> None:
    row = prefix_tree.row(samples)
    prompts = {turn.prompt_ids[:-1] for sample in samples for turn in sample.turns}
    wanted = {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}
    found = set()
    for visible in row.base_mask:
        seen = sorted((row.base_positions[at], row.base_ids[at]) for at in visible.nonzero()[0])
        assert [position for position, _ in seen] == list(range(len(seen)))
        found.add(tuple(int(token) for _, token in seen))
    assert found == wanted
    assert len(row.base_ids) == len(wanted), "a shared prompt token stands twice"


@given(sample_lists)
def test_a_chain_is_one_turn_alone(samples: list[Sample]) -> None:
    turns = [turn for sample in samples for turn in sample.turns]
    assert prefix_tree.row(samples).is_chain == (len(turns) == 1)


@given(sample_lists, st.integers(4, 40))
def test_packing_loses_no_sample_and_fills_no_row_too_far(
    samples: list[Sample], max_length: int
) -> None:
    groups = pack(samples, max_length)
    flat = [sample for group in groups for sample in group]
    assert sorted(map(id, flat)) == sorted(map(id, samples))
    for group in groups:
        assert len(group) == 1 or sum(map(prefix_tree.size, group)) <= max_length


def test_a_context_is_prefilled_once_for_all_turns_of_a_conversation() -> None:
    context, first_tail, second_tail = (1, 2, 3, 4), (5, 6), (5, 7)
    conversation = Sample(
        (
            Turn(context + first_tail, (9,)),
            Turn((*context, 8, 9, *second_tail), (9,)),
        )
    )
    row = prefix_tree.row([conversation])
    # 1 2 3 4 once, then 5 of the first tail, then 8 9 5 of the second prompt.
    assert row.base_ids.tolist() == [1, 2, 3, 4, 5, 8, 9, 5]
    assert row.base_positions.tolist() == [0, 1, 2, 3, 4, 4, 5, 6]
