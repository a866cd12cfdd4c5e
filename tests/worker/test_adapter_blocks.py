"""Block hashes: base KV has no adapter in its key, everything after it has."""

import warnings
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillshare_server.vllm_plugin.adapter_blocks import install_adapter_free_base_blocks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Of what vLLM imports.
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

BLOCK = 4

Hashes = Callable[[int, int, str | None, str | None], list[bytes]]


@pytest.fixture(scope="module")
def hashes() -> Iterator[Hashes]:
    """Hashes of all whole blocks of a request with so many prompt tokens and generated ones."""
    with pytest.MonkeyPatch.context() as patch:
        name = "generate_block_hash_extra_keys"
        patch.setattr(kv_cache_utils, name, getattr(kv_cache_utils, name))
        install_adapter_free_base_blocks()
        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK, sha256)

        def of(prompt: int, generated: int, adapter: str | None, salt: str | None) -> list[bytes]:
            request = Request(
                request_id="r",
                prompt_token_ids=list(range(prompt)),
                sampling_params=SamplingParams(max_tokens=100),
                pooling_params=None,
                lora_request=LoRARequest(adapter, 1, f"/{adapter}") if adapter else None,
                cache_salt=salt,
                block_hasher=hasher,
            )
            request.append_output_token_ids(list(range(prompt, prompt + generated)))
            return list(request.block_hashes)

        yield of


@given(
    prompt=st.integers(1, 30),
    generated=st.integers(0, 12),
    salt=st.sampled_from([None, "tenant"]),
)
def test_blocks_of_base_kv_are_shared_and_later_ones_are_not(
    hashes: Hashes, prompt: int, generated: int, salt: str | None
) -> None:
    """The last prompt token is the decoder's own, and so is the block that it is in."""
    base, one, other = (hashes(prompt, generated, name, salt) for name in (None, "one", "other"))
    shared = (prompt - 1) // BLOCK
    assert len(base) == (prompt + generated) // BLOCK
    assert base[:shared] == one[:shared] == other[:shared]
    for mine, second, third in zip(base[shared:], one[shared:], other[shared:], strict=True):
        assert len({mine, second, third}) == 3


def test_another_salt_still_means_other_blocks(hashes: Hashes) -> None:
    assert set(hashes(20, 0, "one", "a")).isdisjoint(hashes(20, 0, "one", "b"))
