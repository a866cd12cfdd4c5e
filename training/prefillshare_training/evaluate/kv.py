"""The KV of several prompts at once, and what evaluation does to it between two forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

PREFILL_TOKENS = 8192
"""Most tokens, padding included, in one forward pass over prompts (one prompt may have more)."""
_ROOM = 128
"""Tokens by which a full buffer grows."""


@dataclass(frozen=True)
class KV:
    """Keys and values of some rows, one row per prompt. Never changed once made.

    Keys carry their rotary position, so columns may move: a row's tokens keep their order and end
    at the right edge, with padding on the left.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    """Per layer keys and values, [rows, kv_heads, columns, head_size]; none without columns."""
    mask: Tensor
    """[rows, columns] bool: where a token is."""

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> KV:
        """No tokens yet."""
        return cls((), torch.zeros(rows, 0, dtype=torch.bool, device=device))

    def rows(self, indices: Sequence[int]) -> KV:
        """Only these rows, in this order, without the columns that none of them uses."""
        index = torch.tensor(indices, device=self.mask.device)
        mask = self.mask[index]
        first = mask.shape[1] - int(mask.sum(1).max())
        layers = (
            (keys[index, :, first:], values[index, :, first:]) for keys, values in self.layers
        )
        return KV(tuple(layers), mask[:, first:])

    def packed(self) -> KV:
        """Every row moved to the right edge, over the gaps that extending it in two parts left."""
        if not (self.mask[:, :-1] & ~self.mask[:, 1:]).any():
            return self
        width = int(self.mask.sum(1).max())
        # A stable sort moves padding to the front and keeps the tokens' order.
        order = self.mask.long().argsort(dim=1, stable=True)[:, self.mask.shape[1] - width :]

        def moved(states: Tensor) -> Tensor:
            index = order[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
            return states.gather(2, index)

        layers = tuple((moved(keys), moved(values)) for keys, values in self.layers)
        return KV(layers, self.mask.gather(1, order))


def join(first: KV, second: KV) -> KV:
    """The rows of both, the shorter ones padded on the left."""
    width = max(first.mask.shape[1], second.mask.shape[1])
    filled = [part for part in (first, second) if part.layers]
    layers = []
    for layer in range(len(filled[0].layers) if filled else 0):
        pair = []
        for side in (0, 1):
            example = filled[0].layers[layer][side]
            parts = []
            for part in (first, second):
                states = (
                    part.layers[layer][side]
                    if part.layers
                    else example.new_zeros(len(part.mask), example.shape[1], 0, example.shape[3])
                )
                parts.append(_left_padded(states, width, dim=2))
            pair.append(torch.cat(parts))
        layers.append((pair[0], pair[1]))
    masks = [_left_padded(part.mask, width, dim=1) for part in (first, second)]
    return KV(tuple(layers), torch.cat(masks))


def left_padded(tokens: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [rows, longest] with zeros in front, and where tokens are, [rows, longest] bool."""
    width = max(map(len, tokens))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in tokens], device=device)
    mask = [[False] * (width - len(row)) + [True] * len(row) for row in tokens]
    return ids, torch.tensor(mask, device=device)


def positions(mask: Tensor) -> Tensor:
    """Position of every token in its own row; 0 for padding in front. Shaped like `mask`."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


@torch.inference_mode()
def extended(model: Any, kv: KV, tokens: Sequence[Sequence[int]]) -> KV:
    """`kv` and behind it what `model` computes for more tokens of each row, on top of `kv`.

    Rows may get different numbers of tokens, also none.
    """
    if not any(tokens):
        return kv
    longest = max(map(len, tokens))
    rows_at_once = max(1, PREFILL_TOKENS // longest)
    result: KV | None = None
    for start in range(0, len(tokens), rows_at_once):
        part = list(range(start, min(start + rows_at_once, len(tokens))))
        more = _extended_at_once(model, kv.rows(part), tokens[start : start + rows_at_once])
        result = more if result is None else join(result, more)
    assert result is not None
    return result


def _extended_at_once(model: Any, kv: KV, tokens: Sequence[Sequence[int]]) -> KV:
    if not any(tokens):
        return kv
    ids, new = left_padded(tokens, kv.mask.device)
    mask = torch.cat([kv.mask, new], dim=1)
    cache = growing_cache(kv)
    # Always with mask and positions: without them padded rows are silently wrong.
    model(
        ids,
        attention_mask=mask,
        position_ids=positions(mask)[:, -ids.shape[1] :],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return KV(tuple((layer.keys, layer.values) for layer in cache.layers), mask).packed()


def growing_cache(kv: KV) -> Cache:
    """A cache for the model to go on with; `kv` itself stays as it is."""
    if not kv.layers:
        return Cache(layer_class_to_replicate=BufferedLayer)
    return Cache(layers=[BufferedLayer.holding(keys, values) for keys, values in kv.layers])


class BufferedLayer(DynamicLayer):
    """One layer's KV in buffers with room behind it: a step copies only the new token."""

    keys: Any
    values: Any
    _buffers: tuple[Tensor, Tensor] | None = None

    @classmethod
    def holding(cls, keys: Tensor, values: Tensor) -> BufferedLayer:
        """A layer that begins with these; they are not written to."""
        layer = cls()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        return layer

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        held: tuple[Tensor, Tensor] | None = (self.keys, self.values) if start else None
        end = start + key_states.shape[-2]
        if self._buffers is None or end > self._buffers[0].shape[-2]:
            room = _ROOM if held else 0
            self._buffers = (
                _buffer(held and held[0], key_states, end + room),
                _buffer(held and held[1], value_states, end + room),
            )
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., start:end, :] = states
        self.keys, self.values = (buffer[..., :end, :] for buffer in self._buffers)
        return self.keys, self.values


def _buffer(held: Tensor | None, states: Tensor, columns: int) -> Tensor:
    # Zeros, because attention also multiplies what the mask hides.
    buffer = states.new_zeros(*states.shape[:-2], columns, states.shape[-1])
    if held is not None:
        buffer[..., : held.shape[-2], :] = held
    return buffer


def _left_padded(states: Tensor, width: int, dim: int) -> Tensor:
    missing = width - states.shape[dim]
    if not missing:
        return states
    shape = list(states.shape)
    shape[dim] = missing
    return torch.cat([states.new_zeros(shape), states], dim=dim)
