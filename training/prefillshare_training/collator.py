"""From samples to the tensors of a batch; and which samples share a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from prefillshare_training import prefix_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from prefillshare_training.prefix_tree import Row
    from prefillshare_training.samples import Sample

IGNORED = -100
"""Label of padding, as everywhere in transformers."""

Batch = dict[str, torch.Tensor]
"""Batch of r rows, padded on the right to b base and d decoder tokens:

- ``base_input_ids``, ``base_position_ids``: int64 [r, b]
- ``base_mask``: bool [r, 1, b, b]; absent where causal attention says the same
- ``decoder_input_ids``, ``decoder_position_ids``, ``labels``, ``shift_labels``: int64 [r, d]
- ``decoder_mask``: bool [r, 1, d, b + d]
"""


def collate(groups: Sequence[Sequence[Sample]]) -> Batch:
    """The batch of `groups`, one row each."""
    rows = [prefix_tree.row(group) for group in groups]
    base = max(len(row.base_ids) for row in rows)
    own = max(len(row.decoder_ids) for row in rows)
    labels = _stack([row.labels for row in rows], own, IGNORED)
    batch = {
        "base_input_ids": _stack([row.base_ids for row in rows], base),
        "base_position_ids": _positions([row.base_positions for row in rows], base),
        "decoder_input_ids": _stack([row.decoder_ids for row in rows], own),
        "decoder_position_ids": _positions([row.decoder_positions for row in rows], own),
        "decoder_mask": _decoder_mask(rows, base, own),
        "labels": labels,
        # The Trainer's word for labels that already stand at the token that predicts them; it
        # counts a batch's targets by them.
        "shift_labels": labels,
    }
    if not all(row.is_chain for row in rows):
        batch["base_mask"] = _base_mask(rows, base)
    return batch


def pack(samples: Sequence[Sample], max_length: int) -> list[list[Sample]]:
    """Groups of samples that fill rows of at most `max_length` tokens, best fit first.

    The order of the rows is that of their first samples in `samples`. A longer sample stays alone.
    """
    order = sorted(range(len(samples)), key=lambda index: -prefix_tree.size(samples[index]))
    groups: list[list[int]] = []
    room: list[int] = []
    for index in order:
        wanted = prefix_tree.size(samples[index])
        fitting = [group for group, left in enumerate(room) if left >= wanted]
        if fitting:
            best = min(fitting, key=room.__getitem__)
            groups[best].append(index)
            room[best] -= wanted
        else:
            groups.append([index])
            room.append(max_length - wanted)
    return [[samples[index] for index in sorted(group)] for group in sorted(groups, key=min)]


def _stack(rows: Sequence[NDArray[np.int64]], width: int, filler: int = 0) -> torch.Tensor:
    stacked = np.full((len(rows), width), filler, dtype=np.int64)
    for index, row in enumerate(rows):
        stacked[index, : len(row)] = row
    return torch.from_numpy(stacked)


def _positions(rows: Sequence[NDArray[np.int64]], width: int) -> torch.Tensor:
    # Padding counts on: positions that fall would be taken for the start of a packed sequence.
    ends = [int(row[-1]) + 1 if len(row) else 0 for row in rows]
    counted = [
        np.concatenate([row, np.arange(width - len(row)) + end])
        for row, end in zip(rows, ends, strict=True)
    ]
    return _stack(counted, width)


def _base_mask(rows: Sequence[Row], base: int) -> torch.Tensor:
    mask = np.zeros((len(rows), 1, base, base), dtype=np.bool_)
    # Padding sees itself: attention over nothing is not a number.
    mask[:, :] = np.eye(base, dtype=np.bool_)
    for index, row in enumerate(rows):
        count = len(row.base_ids)
        mask[index, 0, :count, :count] = row.base_mask
    return torch.from_numpy(mask)


def _decoder_mask(rows: Sequence[Row], base: int, own: int) -> torch.Tensor:
    mask = np.zeros((len(rows), 1, own, base + own), dtype=np.bool_)
    mask[:, :, :, base:] = np.eye(own, dtype=np.bool_)
    for index, row in enumerate(rows):
        given, count = len(row.base_ids), len(row.decoder_ids)
        mask[index, 0, :count, :given] = row.decoder_mask[:, :given]
        mask[index, 0, :count, base : base + count] = row.decoder_mask[:, given:]
    return torch.from_numpy(mask)
