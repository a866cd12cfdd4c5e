"""Attention of one new token per row, without copying shared KV heads: many times faster on CPU.

transformers repeats every KV head for each query head that reads it, and torch's kernels waste a
block on a single query. Here the query heads that share a KV head are handed over as that head's
queries. The result is the same.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "prefillshare_decode"


def use(model: Any) -> None:
    """Let `model` decode this way, if its attention is torch's at all."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`query` [rows, heads, new, head_size] → [rows, new, heads, head_size]."""
    rows, heads, new, head_size = query.shape
    if new > 1:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    kv_heads = key.shape[1]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, head_size)
    found = scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return found.reshape(rows, 1, heads, value.shape[-1]), None
