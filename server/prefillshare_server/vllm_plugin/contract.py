"""What a decode worker must have in common with its base, checked when the worker starts.

It replaces vLLM's handshake hash, which demands the same model path on both sides and so refuses
every specialist, yet compares neither RoPE nor tokenizer.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prefillshare_server.models import weights
from prefillshare_server.models.geometry import Geometry, differences
from prefillshare_server.vllm_plugin import WORKER_ENV
from prefillshare_server.vllm_plugin.account import PARAMS_KEY


class ContractError(RuntimeError):
    """A worker does not fit its base. The message is one line for the person at the terminal."""

    def __init__(self, message: str) -> None:
        super().__init__(f"prefillshare: worker {os.environ.get(WORKER_ENV, '?')}: {message}")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as vLLM runs it, after its own defaults."""

    directory: str
    dtype: str
    block_size: int
    kv_cache_dtype: str


@dataclass(frozen=True, slots=True)
class BaseContract:
    """The base as the launcher read it; travels in vLLM's configuration of a worker."""

    fingerprint: str
    """16 hex digits over geometry, weights, dtype and block size: names the KV a worker makes."""

    geometry: Geometry
    dtype: str
    block_size: int
    kv_cache_dtype: str

    @classmethod
    def of(
        cls, base_dir: Path, *, dtype: str, block_size: int, kv_cache_dtype: str
    ) -> "BaseContract":
        geometry = Geometry.of(base_dir)
        parts = (geometry.fingerprint(), weights.digest(base_dir), dtype, block_size)
        fingerprint = hashlib.sha256(repr((*parts, kv_cache_dtype)).encode()).hexdigest()[:16]
        return cls(fingerprint, geometry, dtype, block_size, kv_cache_dtype)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_worker(cls, vllm_config: Any) -> "BaseContract":
        """The contract in a worker's configuration. Raises ContractError when it has none."""
        if (transfer := vllm_config.kv_transfer_config) is not None:
            given = transfer.get_from_extra_config(PARAMS_KEY, None)
        else:
            given = vllm_config.additional_config.get(PARAMS_KEY)
        if given is None:
            raise ContractError(
                f"its configuration has no `{PARAMS_KEY}`: start workers with "
                "`prefillshare serve`, which passes the base's contract."
            )
        return cls.from_dict(given)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "BaseContract":
        return cls(**{**data, "geometry": Geometry(**data["geometry"])})


def require_fit(served: ServedModel, base: BaseContract) -> None:
    """Raise ContractError naming each field in which `served` differs from the base."""
    found = [
        (d.field, d.base, d.decoder)
        for d in differences(base.geometry, Geometry.of(Path(served.directory)))
    ]
    found += [
        (field, getattr(base, field), getattr(served, field))
        for field in ("dtype", "block_size", "kv_cache_dtype")
        if getattr(base, field) != getattr(served, field)
    ]
    if found:
        listed = "; ".join(f"{field}: base {a}, decoder {b}" for field, a, b in found)
        raise ContractError(f"{served.directory} does not fit the base: {listed}")
