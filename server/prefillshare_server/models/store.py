"""The model store: a name, a directory or a hub id becomes a directory on this machine.

Store models are built once under ``$PREFILLSHARE_HOME/models`` (or the user's cache folder):
in a temporary directory that is renamed when complete, under a file lock, so that a crash or
a second process never leaves or sees half a model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from prefillshare_server.errors import ConfigError, Problem, suggestion
from prefillshare_server.models.build_once import Progress as Progress
from prefillshare_server.models.build_once import build_once, locked, silent

RECIPE_FILE = "prefillshare-model.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights in other formats than safetensors can double the size of a download.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


class StoreModel(NamedTuple):
    """A model that the store can build."""

    summary: str
    recipe: int
    """Raised when the built files change, so that older ones are built again."""


MODELS: dict[str, StoreModel] = {
    "smollm2-135m-instruct": StoreModel("SmolLM2-135M-Instruct, bf16 (Apache-2.0), 270 MB", 1),
    "tiny-base": StoreModel("random Llama for tests, fp32: the base", 1),
    "tiny-a": StoreModel("decoder of the tiny family", 1),
    "tiny-b": StoreModel("decoder of the tiny family", 1),
    "tiny-c": StoreModel("decoder of the tiny family", 1),
    "tiny-other-geometry": StoreModel("does not fit tiny-base: more KV heads", 1),
    "tiny-other-tokenizer": StoreModel("does not fit tiny-base: other token ids", 1),
}


def home() -> Path:
    """Where store models live; it need not exist yet."""
    if configured := os.environ.get("PREFILLSHARE_HOME"):
        return Path(configured).expanduser() / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "prefillshare" / "models"


def absolute(ref: str, *, relative_to: Path) -> str:
    """`ref` with a directory made absolute; store names and hub ids stay as they are."""
    if ref in MODELS:
        return ref
    path = Path(ref).expanduser()
    if ref.startswith((".", "/", "~")) or (relative_to / path).is_dir():
        return str((relative_to / path).resolve())
    return ref


def resolve(ref: str, *, relative_to: Path | None = None, progress: Progress | None = None) -> Path:
    """The directory of model `ref`, built or downloaded first where necessary (may take minutes).

    `ref` is a store name, a directory (relative ones from `relative_to`, by default the
    working directory) or a hub id. Honors ``HF_HUB_OFFLINE``. Raises ConfigError.
    """
    if ref in MODELS:
        return build(ref, progress=progress)
    place = absolute(ref, relative_to=relative_to or Path.cwd())
    if Path(place).is_absolute():
        if not Path(place).is_dir():
            raise ConfigError(Problem(place, "there is no such directory", "check the path"))
        return Path(place)
    if _HUB_ID.fullmatch(ref):
        return _download(ref, progress or silent)
    raise ConfigError(
        Problem(
            f"model {ref!r}",
            "neither a store name, nor a directory, nor a hub id (owner/name)",
            suggestion(ref, MODELS),
        )
    )


def path_of(name: str) -> Path | None:
    """The directory of an already built store model; None when it is not (or outdated)."""
    _require_known(name)
    directory = home() / name
    try:
        built = json.loads((directory / RECIPE_FILE).read_text())
    except (OSError, ValueError):
        return None
    return directory if built.get("recipe") == MODELS[name].recipe else None


def build(name: str, *, progress: Progress | None = None) -> Path:
    """Build store model `name` unless it is there; returns its directory.

    Safe to call from several processes: one builds, the others wait for it.
    """
    notify = progress or silent

    def write(directory: Path) -> None:
        _write(name, directory, notify)
        recipe = {"name": name, "recipe": MODELS[name].recipe}
        (directory / RECIPE_FILE).write_text(json.dumps(recipe) + "\n")

    return build_once(home() / name, write, found=lambda: path_of(name), progress=notify)


def remove(name: str) -> bool:
    """Delete store model `name` from disk; False when there was nothing to delete."""
    _require_known(name)
    directory = home() / name
    if not directory.exists():
        return False
    with locked(directory, silent):
        shutil.rmtree(directory)
    return True


def _write(name: str, directory: Path, progress: Progress) -> None:
    # Both need torch and transformers, which nothing else here should pay for.
    if name.startswith("tiny-"):
        from prefillshare_server.models import tiny

        tiny.write(name, directory, progress)
    else:
        from prefillshare_server.models import smollm2

        smollm2.write(directory, progress)


def _download(ref: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    progress(f"download {ref}")
    try:
        return Path(snapshot_download(ref, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            Problem(
                f"model {ref}",
                f"cannot be downloaded from the hub ({reason})",
                "check the name and the network, or give a local directory",
            )
        ) from None


def _require_known(name: str) -> None:
    if name not in MODELS:
        raise ConfigError(Problem(f"model {name!r}", "not a store model", suggestion(name, MODELS)))
