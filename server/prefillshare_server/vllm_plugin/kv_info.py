"""Worker extension (`--worker-extension-cls`): the real size of a KV block."""

from typing import Any


class KVInfo:
    """Mixed into vLLM's worker; called through `collective_rpc`."""

    model_runner: Any

    def prefillshare_block_bytes(self) -> int:
        """Bytes of one KV block over all layers on this rank."""
        from prefillshare_server.vllm_plugin.connector import block_bytes

        return block_bytes(self.model_runner.kv_cache_config)
