"""Training runs of the experiments: done once, gone on with after an interruption."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from prefillshare_server.models.provenance import FILE
from prefillshare_training.train import train

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.console import Console

    from prefillshare_training.settings import TrainSettings


def trained(settings: TrainSettings, console: Console) -> Path:
    """The decoder of `settings`, trained unless it is there already.

    Whoever changes the settings changes `settings.out` as well: see `key`.
    """
    if (settings.out / FILE).is_file():
        return settings.out
    unfinished = any(settings.run_dir.glob("checkpoint-*"))
    return train(settings.model_copy(update={"resume": unfinished}), console).out


def key(settings: Mapping[str, Any]) -> str:
    """A name for a folder of models that were trained with these settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]
