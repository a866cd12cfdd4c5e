"""Which tokens of a batch run with an adapter: those from the last prompt token of a request on."""

import sys
import warnings
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillshare_server.vllm_plugin import adapter_positions
from prefillshare_server.vllm_plugin.adapter_positions import NO_ADAPTER, without_base_positions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Of what vLLM imports.
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.v1.worker.gpu.lora_utils import LoraState
    from vllm.v1.worker.gpu_input_batch import InputBatch

requests = st.lists(
    st.tuples(
        st.integers(1, 40),  # prompt tokens
        st.integers(0, 80),  # computed before
        st.integers(1, 50),  # scheduled now
        st.integers(0, 3),  # adapter, 0 for none
    ),
    min_size=1,
    max_size=6,
)


@given(requests)
def test_a_token_has_an_adapter_from_the_last_prompt_token_on(
    batch: list[tuple[int, int, int, int]],
) -> None:
    prompts, computed, scheduled, adapters = zip(*batch, strict=True)
    mapped = [a for a, now in zip(adapters, scheduled, strict=True) for _ in range(now)]
    inputs = (adapters, tuple(mapped), set(adapters))
    of_samples, of_tokens, in_batch = without_base_positions(inputs, scheduled, prompts, computed)
    assert of_tokens == tuple(
        adapter if position >= prompt - 1 else NO_ADAPTER
        for prompt, before, now, adapter in batch
        for position in range(before, before + now)
    )
    assert (of_samples, in_batch) == (adapters, set(adapters))


def test_the_v1_runner_maps_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own batch, with rows beyond the requests in it that hold something old."""
    monkeypatch.setattr(InputBatch, "make_lora_inputs", InputBatch.make_lora_inputs)
    adapter_positions._install_v1()
    adapter_positions._install_v1()
    batch = SimpleNamespace(
        num_reqs=3,
        request_lora_mapping=np.array([1, 0, 2, 9]),
        lora_id_to_lora_request={1: "a", 2: "b"},
        num_prompt_tokens=np.array([5, 3, 2, 100]),
        num_computed_tokens_cpu=np.array([2, 0, 6, 0]),
    )
    of_samples, of_tokens, adapters = InputBatch.make_lora_inputs(
        batch, np.array([4, 3, 1]), np.array([1, 1, 1])
    )
    assert of_tokens == (0, 0, 1, 1, 0, 0, 0, 2)
    assert of_samples == (1, 0, 2)
    assert adapters == {"a", "b"}


def test_the_v2_runner_maps_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own LoRA state; the runner, which needs a GPU, is a stand-in."""

    class GPUModelRunner:
        def __init__(self) -> None:
            self.lora_state = LoraState(max_num_reqs=4)
            self.req_states = SimpleNamespace(
                prompt_len=SimpleNamespace(np=np.array([2, 100, 5, 3])),
                num_computed_prefill_tokens=np.array([2, 0, 2, 0]),
            )

    module = ModuleType("model_runner")
    module.GPUModelRunner = GPUModelRunner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.model_runner", module)
    monkeypatch.setattr(LoraState, "make_lora_inputs", LoraState.make_lora_inputs)
    adapter_positions._install_v2()
    state = GPUModelRunner().lora_state
    adapters = {name: SimpleNamespace(lora_int_id=number) for number, name in enumerate("ab", 1)}
    # In the order of the state, which is not that of the batch.
    for index, (request, adapter) in enumerate([("z", "b"), ("w", "a"), ("x", "a")]):
        state.add_request(request, index, adapters[adapter])
    state.add_request("y", 3, None)
    monkeypatch.setattr(state, "get_activate_loras", lambda _: set("ab"))
    of_samples, of_tokens, _ = state.make_lora_inputs(
        ["x", "y", "z"], np.array([2, 3, 0]), np.array([4, 3, 1])
    )
    assert of_tokens == (0, 0, 1, 1, 0, 0, 0, 2)
    assert of_samples == (1, 0, 2)


@pytest.mark.parametrize("mended", [False, True])
def test_two_runs_of_every_request_have_room(monkeypatch: pytest.MonkeyPatch, mended: bool) -> None:
    """On CPU, where each of so many requests ends its prompt in the same step."""
    monkeypatch.setattr(PunicaWrapperCPU, "__init__", PunicaWrapperCPU.__init__)
    if mended:
        adapter_positions._install_room_for_runs()
    wrapper = PunicaWrapperCPU(64, max_batches=2, device="cpu")
    mapping = LoRAMapping(index_mapping=(0, 1, 0, 2), prompt_mapping=(1, 2), is_prefill=True)
    if mended:
        wrapper.update_metadata(mapping, [1, 2], max_loras=2, vocab_size=100)
        assert wrapper.batch_size == 4
    else:
        with pytest.raises(RuntimeError):
            wrapper.update_metadata(mapping, [1, 2], max_loras=2, vocab_size=100)
