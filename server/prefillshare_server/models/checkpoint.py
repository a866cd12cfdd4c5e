"""Reading a Hugging Face checkpoint directory without torch or transformers."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from prefillshare_server.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pathlib import Path


def config(directory: Path) -> dict[str, Any]:
    """``config.json``; of a multimodal checkpoint, the part about its language model.

    Raises ConfigError when the directory is no full checkpoint.
    """
    if not (directory / "config.json").is_file():
        if (directory / "adapter_config.json").is_file():
            raise ConfigError(
                Problem(
                    str(directory),
                    "is a LoRA adapter, not a full checkpoint",
                    "name it with `adapter:` instead of `model:`",
                )
            )
        raise ConfigError(
            Problem(
                str(directory),
                "is no Hugging Face checkpoint (no config.json)",
                "point to the folder that save_pretrained wrote",
            )
        )
    raw = read_json(directory / "config.json")
    text = raw.get("text_config")
    if isinstance(text, dict):
        return {"architectures": raw.get("architectures"), **text}
    return raw


def dtype(directory: Path) -> str | None:
    """Type of the weights as config.json names it, for example ``bfloat16``."""
    raw = config(directory)
    # `torch_dtype` until transformers 5.
    name = raw.get("dtype") or raw.get("torch_dtype")
    return str(name) if name else None


def context_length(directory: Path) -> int:
    """The model's own context in tokens. Raises ConfigError when config.json does not say."""
    length = config(directory).get("max_position_embeddings")
    if not isinstance(length, int):
        raise ConfigError(
            Problem(
                str(directory / "config.json"),
                "has no max_position_embeddings",
                "set max_model_len in the cluster file",
            )
        )
    return length


def require_weights(directory: Path) -> None:
    """Raise ConfigError unless all weight files are there and not empty."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map", {})
        names = sorted(set(shards.values()))
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
        names += sorted(path.name for path in directory.glob("pytorch_model*.bin"))
    if not names:
        raise ConfigError(
            Problem(str(directory), "has no weights (*.safetensors)", "copy or download them")
        )
    for name in names:
        file = directory / name
        if not file.is_file() or file.stat().st_size == 0:
            raise ConfigError(
                Problem(str(file), "weight file missing or empty", "copy or download it again")
            )


def chat_template(directory: Path) -> str | None:
    """The checkpoint's chat template, from whichever file its version of transformers wrote."""
    own_file = directory / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if not (directory / name).is_file():
            continue
        template = read_json(directory / name).get("chat_template")
        if isinstance(template, list):
            # Older checkpoints name several; `default` is the one for chat.
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default")
        if isinstance(template, str):
            return template
    return None


def special_tokens(directory: Path) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and so on, as chat templates expect them."""
    tokens: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (directory / name).is_file():
            continue
        for key, value in read_json(directory / name).items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                tokens[key] = content
    return tokens


def stop_ids(directory: Path) -> frozenset[int]:
    """Ids that end generation besides the tokenizer's end of sequence, as vLLM reads them."""
    if (directory / "generation_config.json").is_file():
        ids = read_json(directory / "generation_config.json").get("eos_token_id")
    else:
        ids = config(directory).get("eos_token_id")
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def tokenizer_sha256(directory: Path) -> str | None:
    """Hash of what decides how text becomes ids; None when the directory has no tokenizer.

    Two files that differ only in how a version of `tokenizers` writes them hash alike.
    """
    if (directory / "tokenizer.json").is_file():
        raw = read_json(directory / "tokenizer.json")
        model = raw.get("model") or {}
        merges = [
            pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", [])
        ]
        added = [
            {key: token.get(key) for key in ("id", "content", "special")}
            for token in raw.get("added_tokens") or []
        ]
        content = {
            "type": model.get("type"),
            "vocab": model.get("vocab"),
            "merges": merges,
            "added": sorted(added, key=lambda token: str(token["id"])),
            "normalizer": raw.get("normalizer"),
            "pre_tokenizer": raw.get("pre_tokenizer"),
        }
        return _sha256(json.dumps(content, sort_keys=True).encode())
    for name in ("tokenizer.model", "tekken.json"):
        if (directory / name).is_file():
            return _sha256((directory / name).read_bytes())
    return None


def template_sha256(directory: Path) -> str | None:
    """Hash of the chat template; None when the directory has none."""
    template = chat_template(directory)
    return None if template is None else _sha256(template.encode())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError when there is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            Problem(str(path), f"cannot be read ({error})", "copy or download it again")
        ) from None
    if not isinstance(raw, dict):
        raise ConfigError(Problem(str(path), "is no JSON object", "copy or download it again"))
    return raw


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
