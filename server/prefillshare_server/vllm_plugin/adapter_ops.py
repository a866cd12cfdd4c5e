"""LoRA on CPU in batches where not every token has an adapter.

vLLM's torch operations take the adapter of a token as `weights[index]`. A token without one has
the index -1, and so gets the adapter in the last slot. The Triton kernels of GPUs skip such tokens;
here the operations run on the other tokens only. Reported in docs/upstream/.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

SHRINK = "bgmv_shrink"
EXPAND = ("bgmv_expand", "bgmv_expand_slice")


def install_adapter_ops() -> None:
    """Replace the operations wherever vLLM's CPU path calls them. Idempotent."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in (SHRINK, *EXPAND):
        original = getattr(lora_ops, name)
        if not hasattr(original, "prefillshare"):
            fixed = only_adapted_rows(original, clears=name == SHRINK)
            fixed.prefillshare = True  # type: ignore[attr-defined]
            # The sgmv operations look them up in their own module.
            setattr(lora_ops, name, fixed)
            setattr(punica_cpu, name, fixed)


def only_adapted_rows(operation: Callable[..., None], *, clears: bool) -> Callable[..., None]:
    """`operation(inputs, weights, output, indices, ...)` on the rows whose index is not negative.

    inputs [rows, in], weights [slots, 1, out, in], output [rows, out], indices [rows]. The other
    rows of `output` become zero if it `clears`, and stay as they are otherwise.
    """

    @functools.wraps(operation)
    def on_adapted_rows(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        adapted = indices >= 0
        if bool(adapted.all()):
            operation(inputs, weights, output, indices, *args, **kwargs)
            return
        if clears:
            output.zero_()
        rows = adapted.nonzero().flatten()
        if rows.numel():
            part = output[rows]
            operation(inputs[rows], weights, part, indices[rows], *args, **kwargs)
            output[rows] = part

    return on_adapted_rows
