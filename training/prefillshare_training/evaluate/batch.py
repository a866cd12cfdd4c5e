"""Rows that decode in step: one token each, until each has its end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from prefillshare_training.evaluate import kv as kvs
from prefillshare_training.evaluate.kv import KV

Until = Callable[[Sequence[int]], bool]
"""Whether an answer with these ids is complete, for ends that are no single token."""


@dataclass
class Row:
    """A prompt that is being answered."""

    number: int
    budget: int
    token: int
    """What the decoder is fed next."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None


class Batch:
    """Rows that decode in step. Finished ones go on idly until removing them is worth a copy."""

    def __init__(self, decoder: Any, context_length: int) -> None:
        self._decoder = decoder
        self._last_position = context_length - 1
        self.rows: list[Row] = []
        self._mask = torch.zeros(0, 0, dtype=torch.bool)
        self._cache: Any = None

    @property
    def columns(self) -> int:
        """Tokens of the longest row, padding included."""
        return self._mask.shape[1]

    @property
    def worth_compacting(self) -> bool:
        """Whether a quarter of the rows, rounded up, are finished."""
        finished = sum(row.finish is not None for row in self.rows)
        return finished * 4 >= len(self.rows)

    def add(self, rows: list[Row], context: KV) -> None:
        """Let new rows join those that run."""
        if self.rows:
            context = kvs.join(self._kv(), context)
        self.rows = self.rows + rows
        self._resume(context)

    @torch.inference_mode()
    def step(self, stop_ids: Collection[int], until: Until | None = None) -> None:
        """One token for every row."""
        device = self._mask.device
        ids = torch.tensor([[row.token] for row in self.rows], device=device)
        self._mask = torch.cat([self._mask, torch.ones_like(ids, dtype=torch.bool)], dim=1)
        # Only a finished row can pass the end of the context, where a model may have no position.
        position = (self._mask.sum(1, keepdim=True) - 1).clamp(max=self._last_position)
        logits = (
            self._decoder(
                ids,
                attention_mask=self._mask,
                position_ids=position,
                past_key_values=self._cache,
                use_cache=True,
            )
            .logits[:, -1]
            .float()
        )
        best = logits.max(1)
        logprobs = (best.values - logits.logsumexp(1)).tolist()
        for row, token, logprob in zip(self.rows, best.indices.tolist(), logprobs, strict=True):
            row.token = token
            if row.finish is not None:
                continue
            row.ids.append(token)
            row.logprobs.append(logprob)
            if token in stop_ids or (until is not None and until(row.ids)):
                row.finish = "stop"
            elif len(row.ids) == row.budget:
                row.finish = "length"

    def remove_finished(self) -> list[Row]:
        """Take the finished rows out, and the columns that only they used."""
        finished = [row for row in self.rows if row.finish is not None]
        going_on = [index for index, row in enumerate(self.rows) if row.finish is None]
        self.rows = [self.rows[index] for index in going_on]
        if self.rows:
            self._resume(self._kv().rows(going_on))
        else:
            self._cache, self._mask = None, self._mask[:0, :0]
        return finished

    def _kv(self) -> KV:
        layers = self._cache.layers if self._cache is not None else ()
        return KV(tuple((layer.keys, layer.values) for layer in layers), self._mask)

    def _resume(self, kv: KV) -> None:
        self._mask, self._cache = kv.mask, kvs.growing_cache(kv)
