"""Data files inside wheels of others, found without running the wheels' code."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

from prefillshare_server.errors import ConfigError, Problem


def rows(package: str, name: str, *, install: str) -> list[dict[str, Any]]:
    """The JSON lines of a file in an installed package. Raises ConfigError that says `install`."""
    # find_spec of a top-level package does not import it.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / name
        if file.is_file():
            raw = file.read_bytes()
            text = gzip.decompress(raw) if file.suffix == ".gz" else raw
            return [json.loads(line) for line in text.splitlines() if line.strip()]
    raise ConfigError(
        Problem(f"{package}/{name}", "the benchmark's data is not installed", f"run: {install}")
    )
