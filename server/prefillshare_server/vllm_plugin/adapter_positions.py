"""An adapter is on from the last prompt token on: before it, the base computes.

vLLM maps every token of a request to the request's adapter. Here the tokens at positions below
n - 1, for a prompt of n tokens, are mapped to none.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

NO_ADAPTER = 0

Inputs = tuple[tuple[int, ...], tuple[int, ...], set[Any]]
"""vLLM's: adapter of each sampled token, adapter of each token, adapters in the batch."""


def without_base_positions(
    inputs: Inputs, scheduled: Iterable[int], prompts: Iterable[int], computed: Iterable[int]
) -> Inputs:
    """`inputs` with no adapter for tokens that the base computes.

    Of each request in the batch: tokens `scheduled` now, its `prompts` length, tokens `computed`
    before.
    """
    of_samples, of_tokens, adapters = inputs
    mapping = np.asarray(of_tokens, dtype=np.int64)
    start = 0
    for now, prompt, before in zip(scheduled, prompts, computed, strict=True):
        base = min(int(now), max(0, int(prompt) - 1 - int(before)))
        mapping[start : start + base] = NO_ADAPTER
        start += int(now)
    return of_samples, tuple(mapping.tolist()), adapters


def install_adapter_positions() -> None:
    """Wrap what makes the mapping, in both model runners of vLLM. Idempotent."""
    _install_v1()
    _install_v2()
    _install_room_for_runs()


def _install_v1() -> None:
    """CPU, and GPU unless vLLM chooses V2."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    original = InputBatch.make_lora_inputs
    if getattr(original, "prefillshare", False):
        return

    def make_lora_inputs(batch: Any, scheduled: Any, sampled: Any) -> Inputs:
        count = batch.num_reqs
        return without_base_positions(
            original(batch, scheduled, sampled),
            scheduled[:count],
            batch.num_prompt_tokens[:count],
            batch.num_computed_tokens_cpu[:count],
        )

    make_lora_inputs.prefillshare = True  # type: ignore[attr-defined]
    InputBatch.make_lora_inputs = make_lora_inputs


def _install_v2() -> None:
    """GPU. Not run: no machine of this project's tests has one."""
    try:
        from vllm.v1.worker.gpu.lora_utils import LoraState
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    except ImportError:
        return  # It needs Triton, and so does whoever would use it.
    original, start = LoraState.make_lora_inputs, GPUModelRunner.__init__
    if getattr(original, "prefillshare", False):
        return

    def make_lora_inputs(state: Any, req_ids: Any, indices: Any, scheduled: Any) -> Inputs:
        requests = state.prefillshare_requests
        return without_base_positions(
            original(state, req_ids, indices, scheduled),
            scheduled,
            requests.prompt_len.np[indices],
            requests.num_computed_prefill_tokens[indices],
        )

    def init(runner: Any, *args: Any, **kwargs: Any) -> None:
        start(runner, *args, **kwargs)
        if getattr(runner, "lora_state", None) is not None:
            runner.lora_state.prefillshare_requests = runner.req_states

    make_lora_inputs.prefillshare = True  # type: ignore[attr-defined]
    LoraState.make_lora_inputs = make_lora_inputs
    GPUModelRunner.__init__ = init


def _install_room_for_runs() -> None:
    """CPU. vLLM keeps the mapping as runs of tokens with one adapter, at most one per request.

    A prompt that ends in a step is two: the base's and the adapter's. The engine would die.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    start = PunicaWrapperCPU.__init__
    if getattr(start, "prefillshare", False):
        return

    def init(wrapper: Any, tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
        start(wrapper, tokens, 2 * max_batches, device, **kwargs)

    init.prefillshare = True  # type: ignore[attr-defined]
    PunicaWrapperCPU.__init__ = init
