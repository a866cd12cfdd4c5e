"""KV blocks of base KV are the base's, whatever adapter a request names.

vLLM keys every block of a request with the request's adapter, so each role would keep a copy of
the same base KV. In PrefillShare an adapter is on from the last prompt token only: a block before
that holds the base's KV and no key; every later one keeps its key.
"""

from typing import Any


def install_adapter_free_base_blocks() -> None:
    """Replace vLLM's function that makes a block's extra keys. Idempotent."""
    from vllm.v1.core import kv_cache_utils

    original = kv_cache_utils.generate_block_hash_extra_keys
    if getattr(original, "prefillshare", False):
        return

    def extra_keys(
        request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
    ) -> tuple[tuple[Any, ...] | None, int]:
        keys, next_mm_idx = original(request, start_token_idx, end_token_idx, start_mm_idx)
        if request.lora_request is None or end_token_idx > request.num_prompt_tokens - 1:
            return keys, next_mm_idx
        adapter = kv_cache_utils._gen_lora_extra_hash_keys(request)
        kept = tuple(key for key in keys or () if key not in adapter)
        return kept or None, next_mm_idx

    extra_keys.prefillshare = True  # type: ignore[attr-defined]
    kv_cache_utils.generate_block_hash_extra_keys = extra_keys
