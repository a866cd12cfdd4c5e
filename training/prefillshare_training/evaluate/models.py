"""The two models of an evaluation, loaded from directories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.utils import logging

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import checkpoint
from prefillshare_server.models.geometry import Geometry, differences
from prefillshare_training.evaluate import decode_attention


@dataclass(frozen=True)
class Models:
    """A base and a decoder of one geometry and dtype, in evaluation mode; maybe one object."""

    base: Any
    """None when no KV of the base's is wanted."""
    decoder: Any

    @classmethod
    def load(
        cls,
        base_dir: Path,
        decoder_dir: Path | None,
        *,
        dtype: Literal["auto", "float32"] = "auto",
        with_base: bool = True,
    ) -> Models:
        """Load both; an adapter is merged first, as the server does. Raises ConfigError."""
        kind = "float32" if dtype == "float32" else checkpoint.dtype(base_dir) or "bfloat16"
        decoder_dir = full_checkpoint(base_dir, decoder_dir or base_dir)
        _require_fit(base_dir, decoder_dir)
        decoder = _load(decoder_dir, kind)
        if decoder_dir.resolve() == base_dir.resolve():
            return cls(decoder, decoder)
        return cls(_load(base_dir, kind) if with_base else None, decoder)

    @property
    def device(self) -> torch.device:
        """Where both are."""
        return self.decoder.device

    @property
    def context_length(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return int(_text_config(self.decoder).max_position_embeddings)

    @property
    def vocab_size(self) -> int:
        """The number of logits."""
        return int(_text_config(self.decoder).vocab_size)

    @property
    def kv_token_bytes(self) -> int:
        """Memory of one token's KV, all layers."""
        config = _text_config(self.decoder)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * size * self.decoder.dtype.itemsize)


def full_checkpoint(
    base_dir: Path, decoder_dir: Path, progress: Callable[[str], None] | None = None
) -> Path:
    """`decoder_dir`, or for an adapter the checkpoint that it and the base make.

    It is the very one that the server would load. Raises ConfigError.
    """
    if not (decoder_dir / "adapter_config.json").is_file():
        return decoder_dir
    from prefillshare_server.models.adapter import merged

    return merged(base_dir, decoder_dir, progress)


def _load(directory: Path, dtype: str) -> Any:
    checkpoint.require_weights(directory)
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), local_files_only=True
        ).eval()
    layers = DynamicCache(config=model.config).layers
    if any(type(layer) is not DynamicLayer for layer in layers):
        raise ConfigError(
            Problem(
                str(directory),
                "has layers without full attention, which evaluation in this process cannot batch",
                "evaluate it on a running server (--server URL --role NAME)",
            )
        )
    decode_attention.use(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.requires_grad_(False).to(device)


def _require_fit(base_dir: Path, decoder_dir: Path) -> None:
    """Raise ConfigError unless the decoder can read the base's KV and means the same by its ids.

    Prompts are rendered with the base's files, so the decoder needs no tokenizer or template.
    """
    base, decoder = Geometry.of(base_dir), Geometry.of(decoder_dir)
    found = [
        each
        for each in differences(base, decoder)
        if not each.field.endswith("_sha256")
        or (each.field == "tokenizer_sha256" and each.decoder is not None)
    ]
    if found:
        listed = ", ".join(f"{each.field} {each.decoder} (base {each.base})" for each in found)
        raise ConfigError(
            Problem(
                f"decoder {decoder_dir}",
                f"does not fit the base {base_dir}: {listed}",
                "use a fine-tuned copy of the base",
            )
        )


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """A bar of its own would break the evaluation's."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
