"""Everything that decides an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from prefillshare_server.config import LayoutSettings
from prefillshare_server.errors import ConfigError, Problem
from prefillshare_training.evaluate import modes


class EvalSettings(BaseModel):
    """One evaluation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str = Field(min_length=1)
    """Store name, directory or hub id: its tokenizer and template, and the KV in mode shared."""
    decoder: str | None = None
    """Checkpoint or adapter; None is the base itself. Not with `server`."""
    task: str = "exact"
    data: str | None = None
    match: str | None = None
    mode: str = "shared"
    """``own``, ``shared`` or a ratio; see `modes.parse`. A server always shares."""
    server: str | None = None
    """URL of a running server that generates instead of this process."""
    role: str | None = None
    """Its role to ask."""
    concurrency: int = Field(default=8, ge=1)
    """Calls at a time to the server."""
    limit: int | None = Field(default=None, ge=1)
    """Use that many items, drawn with `seed`; a larger limit goes on from a smaller one."""
    seed: int = 0
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest answer; None is the task's."""
    batch_size: int = Field(default=16, ge=1)
    dtype: Literal["auto", "float32"] = "auto"
    """``auto`` is the base's own."""
    layout: LayoutSettings = LayoutSettings()
    out: Path | None = None
    """JSON lines, an answer each; None is made of task, decoder and mode."""
    overwrite: bool = False
    record: bool = False
    """Also write the result into the decoder's prefillshare.json."""

    @property
    def mode_name(self) -> str:
        """The mode as results name it; ``served`` when a server generates."""
        return "served" if self.server is not None else str(modes.parse(self.mode))

    @property
    def items_path(self) -> Path:
        """`out`, or a name made of the other settings."""
        if self.out is not None:
            return self.out
        who = self.role or short_name(self.decoder or self.base)
        name = f"{self.task}-{who}-{self.mode_name}.jsonl"
        return Path("evaluations") / name.replace("/", "_").replace(":", "-")


def short_name(ref: str) -> str:
    """A store name or hub id, or the last part of a path."""
    return Path(ref).name if Path(ref).expanduser().exists() else ref


def require_consistent(settings: EvalSettings) -> None:
    """Raise ConfigError for options that contradict each other."""
    problems = []
    if settings.server is not None:
        if settings.role is None:
            problems.append(Problem("--role", "is missing", "name the role to ask the server for"))
        if settings.decoder is not None:
            problems.append(Problem("--decoder", "the server has its own", "leave one of them out"))
        if settings.mode != "shared":
            problems.append(Problem(f"--mode {settings.mode}", "a server shares", "leave it out"))
        if settings.record:
            problems.append(Problem("--record", "a server names no decoder", "use --decoder"))
    elif settings.role is not None:
        problems.append(Problem("--server", "is missing", "name the server of the role"))
    if settings.record and settings.decoder is None and settings.server is None:
        problems.append(Problem("--record", "there is no decoder", "name it with --decoder"))
    if settings.items_path.suffix == ".json":
        problems.append(
            Problem(f"--out {settings.out}", "the result would take its place", "end it in .jsonl")
        )
    if problems:
        raise ConfigError(*problems)
    modes.parse(settings.mode)
