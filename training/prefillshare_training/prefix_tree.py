"""Packs turns into one row in which every shared prompt token stands once.

The prompts of a conversation share their beginnings: with the context first, all but a role's
instructions and the answer's opener. A row's base part is the tree of its prompts, so one base
pass per row computes the KV of all of them; its decoder part is every turn from the last prompt
token on. Masks say who sees whom, which is also what keeps packed conversations apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from prefillshare_training.samples import Sample, Turn


class Row(NamedTuple):
    """One row of a batch, without padding. `b` base tokens, `d` decoder tokens."""

    base_ids: NDArray[np.int64]
    """[b]: the tree's tokens; a token comes after all it follows."""
    base_positions: NDArray[np.int64]
    """[b]: how many prompt tokens come before each."""
    base_mask: NDArray[np.bool_]
    """[b, b]: a base token sees itself and what it follows in its prompt."""
    decoder_ids: NDArray[np.int64]
    """[d]: of each turn x_n, y_1 … y_{m-1}."""
    decoder_positions: NDArray[np.int64]
    """[d]"""
    decoder_mask: NDArray[np.bool_]
    """[d, b + d]: x_1 … x_{n-1} of its own prompt, then its own turn up to itself."""
    labels: NDArray[np.int64]
    """[d]: the next token of each decoder token: y_1 … y_m of each turn."""

    @property
    def is_chain(self) -> bool:
        """Whether it is one turn alone, whose base tokens simply follow each other."""
        return bool(self.decoder_positions[0] == len(self.base_ids)) and bool(
            (np.diff(self.decoder_positions) == 1).all()
        )


def row(samples: Sequence[Sample]) -> Row:
    """The row of `samples`: N−1 rule, Eq. 7 for every turn of each."""
    tree = _Tree()
    turns = [turn for sample in samples for turn in sample.turns]
    paths = [tree.add(turn.prompt_ids[:-1]) for turn in turns]
    base = len(tree.ids)
    own = sum(len(turn.completion_ids) for turn in turns)
    mask = np.zeros((own, base + own), dtype=np.bool_)
    at = 0
    for turn, path in zip(turns, paths, strict=True):
        size = len(turn.completion_ids)
        mask[at : at + size, path] = True
        mask[at : at + size, base + at : base + at + size] = np.tri(size, dtype=np.bool_)
        at += size
    return Row(
        base_ids=np.array(tree.ids, dtype=np.int64),
        base_positions=np.array(tree.positions, dtype=np.int64),
        base_mask=tree.mask(),
        decoder_ids=np.array([i for turn in turns for i in _fed(turn)], dtype=np.int64),
        decoder_positions=np.concatenate(
            [np.arange(len(turn.completion_ids)) + len(turn.prompt_ids) - 1 for turn in turns]
        ),
        decoder_mask=mask,
        labels=np.array([i for turn in turns for i in turn.completion_ids], dtype=np.int64),
    )


def size(sample: Sample) -> int:
    """Tokens of the sample's row: what the base and the decoder compute for it."""
    tree = _Tree()
    for turn in sample.turns:
        tree.add(turn.prompt_ids[:-1])
    return len(tree.ids) + sum(len(turn.completion_ids) for turn in sample.turns)


def _fed(turn: Turn) -> tuple[int, ...]:
    return (turn.prompt_ids[-1], *turn.completion_ids[:-1])


class _Tree:
    """A trie of prompts: nodes in the order they were added."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self._parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def add(self, prompt: Sequence[int]) -> list[int]:
        """The nodes of `prompt`, new ones added where it leaves what is known."""
        path: list[int] = []
        parent = -1
        for position, token in enumerate(prompt):
            node = self._children.get((parent, token))
            if node is None:
                node = len(self.ids)
                self.ids.append(token)
                self.positions.append(position)
                self._parents.append(parent)
                self._children[parent, token] = node
            path.append(node)
            parent = node
        return path

    def mask(self) -> NDArray[np.bool_]:
        """[nodes, nodes]: each node sees itself and its ancestors."""
        count = len(self.ids)
        mask = np.zeros((count, count), dtype=np.bool_)
        for node, parent in enumerate(self._parents):
            if parent >= 0:
                # A child comes after its parent, whose row is therefore complete.
                mask[node, : parent + 1] = mask[parent, : parent + 1]
            mask[node, node] = True
        return mask
