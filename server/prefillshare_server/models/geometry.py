"""What must agree for a decoder to read the KV that the base computed.

Every comparison is made from files alone, so that a wrong decoder is refused before any
engine starts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import checkpoint

if TYPE_CHECKING:
    from pathlib import Path

# Their frequencies depend on the context length they were made for.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope", "yarn"})


class Difference(NamedTuple):
    """One field in which a decoder does not fit the base."""

    field: str
    base: object
    decoder: object


@dataclass(frozen=True)
class Geometry:
    """Shape and meaning of a model's KV and token ids."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: str
    """Canonical JSON of the rotary embedding's parameters."""
    sliding_window: int | None
    vocab_size: int
    tokenizer_sha256: str | None
    template_sha256: str | None

    @classmethod
    def of(cls, directory: Path) -> Geometry:
        """Read it from a checkpoint directory. Raises ConfigError naming a missing key."""
        config = checkpoint.config(directory)
        num_heads = _integer(config, "num_attention_heads", directory)
        head_size = config.get("head_dim")
        if head_size is None:
            head_size = _integer(config, "hidden_size", directory) // num_heads
        architectures = config.get("architectures") or [config.get("model_type")]
        return cls(
            architecture=str(architectures[0]),
            num_layers=_integer(config, "num_hidden_layers", directory),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_size=head_size,
            rope=_rope(config),
            sliding_window=_sliding_window(config),
            vocab_size=_integer(config, "vocab_size", directory),
            tokenizer_sha256=checkpoint.tokenizer_sha256(directory),
            template_sha256=checkpoint.template_sha256(directory),
        )

    def fingerprint(self) -> str:
        """16 hex digits that change when any field changes."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def differences(base: Geometry, decoder: Geometry) -> list[Difference]:
    """Every field in which `decoder` does not fit `base`; empty when it can read its KV.

    A decoder without a chat template of its own is fine: prompts are rendered with the base's.
    """
    ours, theirs = asdict(base), asdict(decoder)
    return [
        Difference(field, ours[field], theirs[field])
        for field in ours
        if ours[field] != theirs[field]
        and not (field == "template_sha256" and theirs[field] is None)
    ]


def _rope(config: dict[str, Any]) -> str:
    """Canonical form of ``rope_parameters`` (new spelling) or ``rope_theta`` + ``rope_scaling``."""
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict) and any(isinstance(v, dict) for v in parameters.values()):
        # One set per kind of attention layer.
        layers = {kind: _rope_set(inner, config) for kind, inner in parameters.items() if inner}
        return json.dumps(layers, sort_keys=True)
    if not parameters:
        parameters = config.get("rope_scaling")
    return json.dumps(_rope_set(parameters or {}, config), sort_keys=True)


def _rope_set(parameters: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in parameters.items() if value is not None}
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    canonical: dict[str, Any] = {
        key: float(value) if isinstance(value, int | float) else value
        for key, value in found.items()
    }
    canonical["rope_type"] = kind
    canonical.setdefault("rope_theta", float(config.get("rope_theta") or 10000.0))
    canonical.setdefault("partial_rotary_factor", float(config.get("partial_rotary_factor") or 1.0))
    if kind in _LENGTH_DEPENDENT_ROPE and "original_max_position_embeddings" not in canonical:
        canonical["max_position_embeddings"] = config.get("max_position_embeddings")
    return canonical


def _sliding_window(config: dict[str, Any]) -> int | None:
    # Qwen checkpoints name a window and switch it off.
    if config.get("use_sliding_window") is False:
        return None
    window: int | None = config.get("sliding_window")
    return window


def _integer(config: dict[str, Any], key: str, directory: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            Problem(
                f"{directory / 'config.json'}: {key}",
                f"{value!r} is not a positive whole number",
                "use a decoder-only transformer checkpoint",
            )
        )
    return value
