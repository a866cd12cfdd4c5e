"""LoRA on CPU where not every token has an adapter: those that have none stay as they are."""

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefillshare_server.vllm_plugin.adapter_ops import EXPAND, SHRINK, only_adapted_rows

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Of what vLLM imports.
    from vllm.lora.ops.torch_ops import lora_ops

SLOTS, WIDTH, RANK, OFFSET = 3, 6, 2, 1

indices = st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=8)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@given(indices)
def test_shrink_is_zero_without_an_adapter(adapters: list[int]) -> None:
    inputs, weights = drawn(len(adapters), WIDTH), drawn(SLOTS, 1, RANK, WIDTH)
    output = torch.full((len(adapters), RANK), torch.nan)
    fixed = only_adapted_rows(getattr(lora_ops, SHRINK), clears=True)
    fixed(inputs, weights, output, torch.tensor(adapters), 0.5)
    for row, adapter in enumerate(adapters):
        wanted = 0.5 * weights[adapter, 0] @ inputs[row] if adapter >= 0 else torch.zeros(RANK)
        torch.testing.assert_close(output[row], wanted)


@pytest.mark.parametrize("name", EXPAND)
@given(adapters=indices)
def test_expand_adds_nothing_without_an_adapter(name: str, adapters: list[int]) -> None:
    inputs, weights = drawn(len(adapters), RANK), drawn(SLOTS, 1, WIDTH, RANK)
    before = drawn(len(adapters), WIDTH + OFFSET)
    place = (OFFSET, WIDTH) if name.endswith("slice") else ()
    start = OFFSET if place else 0
    output = before.clone()
    operation: Callable[..., None] = getattr(lora_ops, name)
    only_adapted_rows(operation, clears=False)(
        inputs, weights, output, torch.tensor(adapters), *place, add_inputs=True
    )
    for row, adapter in enumerate(adapters):
        wanted = before[row].clone()
        if adapter >= 0:
            wanted[start : start + WIDTH] += weights[adapter, 0] @ inputs[row]
        torch.testing.assert_close(output[row], wanted)


@pytest.mark.parametrize("name", [SHRINK, *EXPAND])
def test_vllm_still_needs_the_correction(name: str) -> None:
    """When this fails, vLLM has mended it: remove adapter_ops.py and docs/upstream's report."""
    width = (WIDTH, RANK) if name == SHRINK else (RANK, WIDTH)
    inputs, weights = drawn(1, width[0]), drawn(SLOTS, 1, width[1], width[0])
    output = torch.zeros(1, width[1])
    place = (0, WIDTH) if name.endswith("slice") else ()
    original = getattr(lora_ops, name)
    # A worker of this process would have replaced it.
    getattr(original, "__wrapped__", original)(inputs, weights, output, torch.tensor([-1]), *place)
    torch.testing.assert_close(output[0], weights[SLOTS - 1, 0] @ inputs[0])
