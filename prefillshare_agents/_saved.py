"""A session as a file, to go on with it in another process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ._records import CallRecord


class SavedSession(BaseModel):
    """What `Session.save` writes, as JSON."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["prefillshare-session-1"] = "prefillshare-session-1"
    id: str
    parent_id: str | None = None
    options: dict[str, Any] = {}
    """Of the constructor: mode, speakers, prefill, limits."""
    messages: list[dict[str, Any]]
    calls: list[CallRecord]


def write(saved: SavedSession, path: str | os.PathLike[str]) -> None:
    """Write the file, whole or not at all. Raises OSError."""
    target = Path(path)
    with tempfile.NamedTemporaryFile(
        "w", dir=target.parent, prefix=f".{target.name}.", delete=False, encoding="utf-8"
    ) as file:
        try:
            file.write(saved.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def read(path: str | os.PathLike[str]) -> SavedSession:
    """Read a file that `write` wrote. Raises OSError, or ValueError that names what is wrong."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        return SavedSession.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"{os.fspath(path)}: {where}: {first['msg']}; give a file that Session.save wrote"
        ) from None
