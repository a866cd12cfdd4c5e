"""Attention that reads a base's KV handed to it as a plain argument of the forward pass.

A Hugging Face cache would do for one forward pass, but it is written on every call, and gradient
checkpointing drops it and goes on without the prompt. Here the base's KV travels through the
model's keyword arguments, so a recomputed layer sees the very same tensors, and a model that does
not pass them on fails on the shape of its mask instead of training on nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "prefillshare"
"""Name under which transformers finds this attention."""

LayerKV = tuple[torch.Tensor, torch.Tensor]
"""Keys after the rotary embedding and values of one layer, each [batch, KV heads, tokens, head]."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    base_kv: tuple[LayerKV, ...] | None = None,
    kv_sink: dict[int, LayerKV] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention over ``[base_kv; key]``.

    Args:
        query, key, value: [batch, heads, tokens, head size], as transformers passes them.
        attention_mask: bool [batch, 1, tokens, base tokens + tokens], True where attended; None is
            causal and only possible without `base_kv`.
        base_kv: one entry per layer, put before this call's own keys and values.
        kv_sink: gets this layer's own keys and values, detached.

    Raises ValueError for `base_kv` without a mask: which of it may be seen is not to be guessed.
    """
    layer: int = module.layer_idx
    if kv_sink is not None:
        kv_sink[layer] = (key.detach(), value.detach())
    if base_kv is not None:
        if attention_mask is None:
            raise ValueError("base KV needs an explicit attention mask")
        base_key, base_value = base_kv[layer]
        key = torch.cat([base_key.to(key.dtype), key], dim=-2)
        value = torch.cat([base_value.to(value.dtype), value], dim=-2)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def use(model: PreTrainedModel) -> None:
    """Make `model` attend with `attend`. Its saved config does not mention it."""
    model.set_attn_implementation(IMPLEMENTATION)


AttentionInterface.register(IMPLEMENTATION, attend)
