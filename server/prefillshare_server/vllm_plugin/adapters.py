"""Adapters of a worker by name: each is a folder in the launcher's folder of adapters.

A name is a digest of the adapter's content (`models/pooled_adapter.py`), so it never means another
adapter later. A worker loads one when a request first names it, also after a restart.
"""

import os
from pathlib import Path

ADAPTERS_ENV = "PREFILLSHARE_ADAPTERS"
"""Set by the launcher for workers that serve adapters: the folder."""


def install_adapters() -> None:
    """Let vLLM's server find adapters in the folder. Idempotent."""
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    folder = Path(os.environ[ADAPTERS_ENV])

    class Adapters(LoRAResolver):
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            directory = folder / Path(lora_name).name
            if directory.name != lora_name or not directory.is_dir():
                return None
            # vLLM gives it a number of its own.
            return LoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=str(directory))

    if "prefillshare" not in LoRAResolverRegistry.get_supported_resolvers():
        LoRAResolverRegistry.register_resolver("prefillshare", Adapters())
