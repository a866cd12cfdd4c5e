"""What a decoder was trained for: ``prefillshare.json`` beside its weights.

A decoder reads KV that another model computed. One that was not trained on that KV answers
without an error, and worse: whether it may be served must be decided before it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import weights
from prefillshare_server.models.geometry import Geometry

if TYPE_CHECKING:
    from prefillshare_server.models.layout import Layout

FILE = "prefillshare.json"
FORMAT = 1
TRAINED = "prefillshare"
"""The method that trains a decoder on its base's KV."""

_OVERRIDE = (
    "or serve it all the same, whatever its answers: allow_untrained: true in the cluster file, "
    "or --allow-untrained"
)
_REWRITE = "copy it again from where the decoder was trained, or train it again"


@dataclass(frozen=True)
class Provenance:
    """Where a decoder's weights come from. All values are JSON's."""

    method: str
    """``prefillshare`` (on the base's KV) or ``full-ft`` (on its own)."""
    base: str
    """As the user named it."""
    base_fingerprint: str
    layout_fingerprint: str
    data: Mapping[str, Any]
    """``source``, ``sha256``, ``samples`` and so on."""
    hyperparameters: Mapping[str, Any]
    evaluation: Sequence[Mapping[str, Any]]
    """One entry per recorded evaluation."""
    versions: Mapping[str, Any]
    """Of the packages that trained it."""
    format: int = FORMAT

    def write(self, directory: Path) -> None:
        """Write `FILE` into `directory`, all of it or nothing. Raises ConfigError."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        replace_file(directory / FILE, text.encode())

    @classmethod
    def read(cls, directory: Path) -> Provenance | None:
        """What `directory` says of itself; None when it says nothing.

        Raises ConfigError when its file is damaged or of a later format.
        """
        path = directory / FILE
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(Problem(str(path), f"cannot be read ({error})", _REWRITE)) from None
        return cls._parse(raw, path)

    @classmethod
    def _parse(cls, raw: object, path: Path) -> Provenance:
        if isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] > FORMAT:
            raise ConfigError(
                Problem(
                    str(path),
                    f"has format {raw['format']}, this program knows {FORMAT}",
                    "upgrade prefillshare-agents",
                )
            )
        wanted = {field.name: _KINDS[str(field.type)] for field in fields(cls)}
        if not isinstance(raw, dict) or raw.keys() != wanted.keys():
            listed = ", ".join(wanted)
            raise ConfigError(Problem(str(path), f"is no object of {listed}", _REWRITE))
        for name, kind in wanted.items():
            if not isinstance(raw[name], kind):
                raise ConfigError(
                    Problem(f"{path}: {name}", f"{raw[name]!r} is not of its type", _REWRITE)
                )
        return cls(**{**raw, "evaluation": tuple(raw["evaluation"])})


_KINDS: dict[str, type] = {
    "str": str,
    "int": int,
    "Mapping[str, Any]": dict,
    "Sequence[Mapping[str, Any]]": list,
}
"""How JSON spells each type of a field."""


def base_fingerprint(directory: Path) -> str:
    """16 hex digits that name a base by its geometry, tokenizer and weights (sampled).

    Neither its chat template, which is the layout's matter, nor how it is served counts.
    Raises ConfigError when `directory` is no checkpoint.
    """
    geometry = replace(Geometry.of(directory), template_sha256=None)
    parts = (geometry.fingerprint(), weights.digest(directory))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def untrained(directory: Path, base_dir: Path, layout: Layout) -> list[Problem]:
    """Why the decoder in `directory` must not read this base's KV; empty when it may.

    It may when its weights are the base's own, or when it was trained on this base's KV with
    this layout. `directory` is a full checkpoint or an adapter.
    """
    try:
        provenance = Provenance.read(directory)
        if provenance is not None and provenance.method == TRAINED:
            return _mismatches(provenance, directory, base_dir, layout)
        if weights.identical(directory, base_dir):
            return []
    except ConfigError as error:
        return list(error.problems)
    reason = f"no {FILE}" if provenance is None else f"its method is {provenance.method}"
    return [
        Problem(
            str(directory),
            f"was not trained to read the base's KV ({reason})",
            f"train one with `prefillshare train --base {base_dir} …`, {_OVERRIDE}",
        )
    ]


def _mismatches(
    provenance: Provenance, directory: Path, base_dir: Path, layout: Layout
) -> list[Problem]:
    found = []
    base = base_fingerprint(base_dir)
    if provenance.base_fingerprint != base:
        found.append(
            Problem(
                str(directory),
                f"was trained for base {provenance.base} ({provenance.base_fingerprint}), "
                f"not for {base_dir} ({base})",
                f"set base.model to that base, train again for this one, {_OVERRIDE}",
            )
        )
    if provenance.layout_fingerprint != layout.fingerprint:
        found.append(
            Problem(
                str(directory),
                f"was trained with prompt layout {provenance.layout_fingerprint}, "
                f"this cluster's is {layout.fingerprint}",
                "set layout as it was in training and use the base's own chat template, "
                f"train again, {_OVERRIDE}",
            )
        )
    return found


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` through a temporary sibling, readable by all. Raises ConfigError."""
    work: str | None = None
    try:
        handle, work = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(work).chmod(0o644)
        Path(work).rename(path)
    except OSError as error:
        raise ConfigError(
            Problem(
                str(path),
                f"cannot be written ({error.strerror or error})",
                "free some space or choose another folder",
            )
        ) from None
    finally:
        if work is not None:
            Path(work).unlink(missing_ok=True)
