"""Greedy generation in this process, on Hugging Face models and a chosen prompt KV.

The context of every prompt x_1 … x_n is the KV of x_1 … x_{n−1}, computed by the base, by the
decoder or partly by each (`modes`). The decoder itself then processes x_n and what it generates:
the N−1 rule, as in training and serving. ``own`` is the same loop on the decoder's own context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import torch

from prefillshare_training.evaluate import kv as kvs
from prefillshare_training.evaluate.batch import Batch, Row, Until
from prefillshare_training.evaluate.kv import KV
from prefillshare_training.evaluate.models import Models
from prefillshare_training.evaluate.modes import (
    Mode,
    Ratio,
    base_layers,
    base_positions,
    needs_base,
)

if TYPE_CHECKING:
    from pathlib import Path

    from prefillshare_training.samples import Turn

KV_BYTES = 2 * 2**30
"""Most memory for the KV of the prompts that are answered together."""
LOGIT_BYTES = 2**28
"""Most memory for the fp32 logits of answers that are scored together."""

Progress = Callable[[int, "Answer"], None]
"""Called with the number of a prompt and its answer as soon as the answer is complete."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the decoder said to one prompt."""

    ids: tuple[int, ...]
    """A stop id that ended it included."""
    logprobs: tuple[float, ...]
    """Log-probability of each id."""
    finish: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Score:
    """A given completion under the decoder."""

    logprobs: tuple[float, ...]
    greedy: bool
    """Whether every token is the one that greedy decoding would have chosen."""


class Engine:
    """Answers many prompts in batches; no row's answer depends on the others (in fp32, exactly)."""

    def __init__(
        self,
        base_dir: Path,
        decoder_dir: Path | None,
        *,
        mode: Mode,
        dtype: Literal["auto", "float32"] = "auto",
        batch_size: int = 16,
    ) -> None:
        """Load the models; `decoder_dir` None means that the base itself decodes.

        ``auto`` is the base's dtype for both, as on the server. Raises ConfigError for models that
        are missing, do not fit each other, or whose attention is not full.
        """
        models = Models.load(base_dir, decoder_dir, dtype=dtype, with_base=needs_base(mode))
        self._set(models, mode, batch_size)

    @classmethod
    def on(cls, models: Models, *, mode: Mode, batch_size: int = 16) -> Self:
        """An engine on models that are in memory already, for example another engine's."""
        engine = cls.__new__(cls)
        engine._set(models, mode, batch_size)
        return engine

    def _set(self, models: Models, mode: Mode, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if needs_base(mode) and models.base is None:
            raise ValueError(f"mode {mode} needs the base, which was not loaded")
        self.models = models
        self.mode = mode
        self.batch_size = batch_size

    @property
    def context_length(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self.models.context_length

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        stop_ids: Collection[int] = (),
        progress: Progress | None = None,
        until: Until | None = None,
    ) -> list[Answer]:
        """Greedy answers, in the order of `prompts`; blocks until all are complete.

        An answer ends with a stop id, when `until` says so, after `max_tokens`, or where the
        model's context ends (finish ``length``). Raises ValueError for a prompt that is empty or
        fills the context.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {number} is empty; at least one token is needed")
            self._require_fit(f"prompt {number}", len(prompt) + 1)
        answers: dict[int, Answer] = {}
        # The longest first: what does not fit into memory fails at once, and neighbours are alike.
        waiting = deque(sorted(range(len(prompts)), key=lambda i: -len(prompts[i])))
        batch = Batch(self.models.decoder, self.models.context_length)
        while waiting or batch.rows:
            numbers = self._admitted(waiting, prompts, batch, max_tokens)
            if numbers:
                new = [prompts[number] for number in numbers]
                rows = [
                    Row(number, self._budget(prompt, max_tokens), prompt[-1])
                    for number, prompt in zip(numbers, new, strict=True)
                ]
                batch.add(rows, self._context(new))
            while not batch.worth_compacting:
                batch.step(stop_ids, until)
            for row in batch.remove_finished():
                assert row.finish is not None
                answer = Answer(tuple(row.ids), tuple(row.logprobs), row.finish)
                answers[row.number] = answer
                if progress is not None:
                    progress(row.number, answer)
        return [answers[number] for number in range(len(prompts))]

    def logprobs(self, turns: Sequence[Turn]) -> list[list[float]]:
        """Log-probability of each completion token, teacher forced, in the order of `turns`."""
        return [list(score.logprobs) for score in self.score(turns)]

    @torch.inference_mode()
    def score(self, turns: Sequence[Turn]) -> list[Score]:
        """What the decoder thinks of given completions, in the order of `turns`."""
        for number, turn in enumerate(turns):
            self._require_fit(f"turn {number}", len(turn.prompt_ids) + len(turn.completion_ids))
        scores: dict[int, Score] = {}
        order = sorted(range(len(turns)), key=lambda i: -len(turns[i].prompt_ids))
        while order:
            numbers = self._scored_together(order, turns)
            order = order[len(numbers) :]
            together = [turns[number] for number in numbers]
            context = self._context([turn.prompt_ids for turn in together])
            scores.update(zip(numbers, self._forced(context, together), strict=True))
        return [scores[number] for number in range(len(turns))]

    @torch.inference_mode()
    def _context(self, prompts: Sequence[Sequence[int]]) -> KV:
        """The KV of every prompt but its last token, by whom the mode says."""
        base, decoder, mode = self.models.base, self.models.decoder, self.mode
        nothing = KV.empty(len(prompts), self.models.device)
        if isinstance(mode, Ratio) and mode.by == "layer":
            heads = [prompt[:-1] for prompt in prompts]
            theirs, own = kvs.extended(base, nothing, heads), kvs.extended(decoder, nothing, heads)
            shared = base_layers(mode, len(own.layers))
            return KV(theirs.layers[:shared] + own.layers[shared:], own.mask)
        shares = [base_positions(mode, len(prompt)) for prompt in prompts]
        by_base = [prompt[:share] for prompt, share in zip(prompts, shares, strict=True)]
        by_decoder = [prompt[share:-1] for prompt, share in zip(prompts, shares, strict=True)]
        return kvs.extended(decoder, kvs.extended(base, nothing, by_base), by_decoder)

    def _forced(self, context: KV, turns: Sequence[Turn]) -> list[Score]:
        """One pass over x_n, y_1 … y_{m−1} of each turn, padded on the right."""
        width = max(len(turn.completion_ids) for turn in turns)
        fed, wanted, new = [], [], []
        for turn in turns:
            length = len(turn.completion_ids)
            pad = [0] * (width - length)
            fed.append([turn.prompt_ids[-1], *turn.completion_ids[:-1], *pad])
            wanted.append([*turn.completion_ids, *pad])
            new.append([True] * length + [False] * (width - length))
        device = self.models.device
        mask = torch.cat([context.mask, torch.tensor(new, device=device)], dim=1)
        logits = self.models.decoder(
            torch.tensor(fed, device=device),
            attention_mask=mask,
            position_ids=kvs.positions(mask)[:, -width:],
            past_key_values=kvs.growing_cache(context),
            use_cache=True,
        ).logits.float()
        chosen = logits.gather(2, torch.tensor(wanted, device=device).unsqueeze(2)).squeeze(2)
        logprobs = (chosen - logits.logsumexp(2)).tolist()
        greedy = (chosen == logits.max(2).values).tolist()
        lengths = [len(turn.completion_ids) for turn in turns]
        return [
            Score(tuple(row[:length]), all(best[:length]))
            for row, best, length in zip(logprobs, greedy, lengths, strict=True)
        ]

    def _admitted(
        self,
        waiting: deque[int],
        prompts: Sequence[Sequence[int]],
        batch: Batch,
        max_tokens: int,
    ) -> list[int]:
        """Take from `waiting` what there is room for: at least one prompt if none is running."""
        numbers: list[int] = []
        longest = batch.columns + max((row.budget - len(row.ids) for row in batch.rows), default=0)
        while waiting and len(batch.rows) + len(numbers) < self.batch_size:
            prompt = prompts[waiting[0]]
            longest = max(longest, len(prompt) + self._budget(prompt, max_tokens))
            rows = len(batch.rows) + len(numbers) + 1
            # Joining and compacting rows holds the old KV and the new at once.
            if rows > 1 and 2 * rows * longest * self.models.kv_token_bytes > KV_BYTES:
                break
            numbers.append(waiting.popleft())
        return numbers

    def _scored_together(self, order: Sequence[int], turns: Sequence[Turn]) -> list[int]:
        numbers: list[int] = []
        width = longest = 0
        for number in order[: self.batch_size]:
            turn = turns[number]
            width = max(width, len(turn.completion_ids))
            longest = max(longest, len(turn.prompt_ids) + width)
            rows = len(numbers) + 1
            kv_bytes = 2 * rows * longest * self.models.kv_token_bytes
            logit_bytes = rows * width * self.models.vocab_size * 4
            if numbers and (kv_bytes > KV_BYTES or logit_bytes > LOGIT_BYTES):
                break
            numbers.append(number)
        return numbers

    def _budget(self, prompt: Sequence[int], max_tokens: int) -> int:
        return min(max_tokens, self.models.context_length - len(prompt))

    def _require_fit(self, what: str, tokens: int) -> None:
        if tokens > self.models.context_length:
            raise ValueError(
                f"{what} needs room for {tokens} tokens; the model's context is "
                f"{self.models.context_length}"
            )
