"""The objectives: cache-conditioned fine-tuning (paper, section 3.2, Eq. 7) and the ordinary one.

Both take the same batch. Cache-conditioned: the base computes the KV of x_1 … x_{n-1}, a constant;
the decoder runs from x_n on. Ordinary (Full-FT): one model runs over all of it and is trained on
its own KV. The targets are the same, so the two losses can be compared.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch.nn import functional

from prefillshare_training.collator import IGNORED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prefillshare_training.attention import LayerKV
    from prefillshare_training.collator import Batch


def base_kv(base: Any, batch: Batch) -> tuple[LayerKV, ...] | None:
    """KV of a batch's base tokens, one pair per layer: [rows, KV heads, base tokens, head size].

    Computed without gradient and without dropout. Of a `PeftModel` the adapter is off: then the
    base and the decoder are one set of weights. None when no row has a base token.
    """
    if batch["base_input_ids"].shape[1] == 0:
        return None
    sink: dict[int, LayerKV] = {}
    with torch.no_grad(), _evaluating(base), _without_adapter(base):
        base(
            input_ids=batch["base_input_ids"],
            attention_mask=batch.get("base_mask"),
            position_ids=batch["base_position_ids"],
            use_cache=False,
            logits_to_keep=1,
            kv_sink=sink,
        )
    return tuple(sink[layer] for layer in range(len(sink)))


def shared_logits(decoder: Any, batch: Batch, kv: tuple[LayerKV, ...] | None) -> torch.Tensor:
    """Logits of the decoder on the base's KV: [rows, decoder tokens, vocabulary]."""
    logits: torch.Tensor = decoder(
        input_ids=batch["decoder_input_ids"],
        attention_mask=batch["decoder_mask"],
        position_ids=batch["decoder_position_ids"],
        use_cache=False,
        base_kv=kv,
    ).logits
    return logits


def own_logits(model: Any, batch: Batch) -> torch.Tensor:
    """Logits of one model over prompts and answers: [rows, decoder tokens, vocabulary]."""
    base_ids, own_ids = batch["base_input_ids"], batch["decoder_input_ids"]
    positions = torch.cat([batch["base_position_ids"], batch["decoder_position_ids"]], dim=1)
    logits: torch.Tensor = model(
        input_ids=torch.cat([base_ids, own_ids], dim=1),
        attention_mask=_own_mask(batch, positions),
        position_ids=positions,
        use_cache=False,
        logits_to_keep=own_ids.shape[1],
    ).logits
    return logits


def summed_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sum over all targets of −log p(y_t | y_<t, prompt): a scalar in float32."""
    return functional.cross_entropy(
        logits.float().flatten(0, 1),
        batch["labels"].flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


def _own_mask(batch: Batch, positions: torch.Tensor) -> torch.Tensor | None:
    """bool [rows, 1, base + decoder tokens, the same]; None where it is plainly causal."""
    if "base_mask" not in batch and bool((positions[:, 1:] - positions[:, :-1] == 1).all()):
        return None
    rows, _, own, total = batch["decoder_mask"].shape
    base = total - own
    before = batch.get("base_mask")
    if before is None:
        causal = torch.ones(base, base, dtype=torch.bool, device=positions.device).tril()
        before = causal.expand(rows, 1, base, base)
    blind = torch.zeros(rows, 1, base, own, dtype=torch.bool, device=positions.device)
    return torch.cat([torch.cat([before, blind], dim=-1), batch["decoder_mask"]], dim=-2)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _without_adapter(model: Any) -> Any:
    return model.disable_adapter() if isinstance(model, PeftModel) else nullcontext()
