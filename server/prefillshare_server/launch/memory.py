"""How many KV blocks fit: only where vLLM's own choice would not do."""

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.launch.hardware import Hardware
from prefillshare_server.models.geometry import Geometry

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CPU_MEMORY_SHARE = 0.1
_CPU_BYTES_AT_MOST = 1 << 30
_GPU_MEMORY_SHARE = 0.9


def kv_block_bytes(geometry: Geometry, dtype: str, block_size: int) -> int:
    """Bytes of one KV block over all layers: keys and values of `block_size` tokens."""
    per_token = 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_size
    return per_token * _DTYPE_BYTES[dtype] * block_size


def cpu_blocks(
    hardware: Hardware, *, workers: int, block_bytes: int, block_size: int, max_model_len: int
) -> int:
    """Blocks per worker on CPU: a tenth of the memory for all workers, at most 1 GiB for each.

    vLLM's default would give every worker nearly all of the machine's memory. At least one
    request of full length fits (vLLM keeps one block for itself).
    """
    budget = min(_CPU_BYTES_AT_MOST, int(hardware.memory_bytes * _CPU_MEMORY_SHARE) // workers)
    return max(budget // block_bytes, _fewest_blocks(block_size, max_model_len))


def require_room(blocks: int, *, block_size: int, max_model_len: int) -> None:
    """Raise ConfigError when `kv.blocks` cannot hold one request of full length."""
    fewest = _fewest_blocks(block_size, max_model_len)
    if blocks < fewest:
        raise ConfigError(
            Problem(
                "kv.blocks",
                f"{blocks} blocks of {block_size} tokens cannot hold one request of "
                f"max_model_len {max_model_len} tokens",
                f"set at least {fewest}, or a smaller max_model_len",
            )
        )


def _fewest_blocks(block_size: int, max_model_len: int) -> int:
    # vLLM keeps one block for itself.
    return -(-max_model_len // block_size) + 1


def gpu_memory_utilization(hardware: Hardware, *, workers: int) -> float | None:
    """Share of a GPU per worker when several workers must share one; else None."""
    if hardware.gpus == 0 or workers <= hardware.gpus:
        return None
    return round(_GPU_MEMORY_SHARE / -(-workers // hardware.gpus), 3)
