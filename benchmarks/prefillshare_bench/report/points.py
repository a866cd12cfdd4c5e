"""Measured points, as a run left them in a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prefillshare_bench import traces
from prefillshare_server.errors import ConfigError, Problem

VERSION = 1
_FIELDS = ("version", "experiment", "system", "repeat", "figures", "calls", "workload", "about")
_AGAIN = "delete it and measure the point again"


@dataclass(frozen=True)
class Point:
    """One measurement: a system under one load, once. `data` is the file, whole."""

    file: Path
    data: Mapping[str, Any]

    @property
    def experiment(self) -> str:
        return str(self.data["experiment"])

    @property
    def system(self) -> str:
        return str(self.data["system"])

    @property
    def repeat(self) -> int:
        return int(self.data["repeat"])

    @property
    def rate(self) -> float | None:
        """Sessions per second; None in a closed loop."""
        return self.data.get("rate")

    @property
    def limit(self) -> int | None:
        """Sessions at once: the client's in a closed loop, else the server's `max_sessions`."""
        limit: int | None = self.data.get("limit")
        return self.data.get("max_sessions") if limit is None else limit

    @property
    def figures(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.data["figures"]
        return found

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self.data["calls"]
        return found

    @property
    def workload(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.data["workload"]
        return found

    @property
    def about(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.data["about"]
        return found

    def workers(self, when: str) -> Sequence[Mapping[str, Any]]:
        """The states of all workers `before`, `after` or at their `peak`."""
        found: Sequence[Mapping[str, Any]] = self.data.get("workers", {}).get(when) or ()
        return found

    @property
    def roles(self) -> int:
        return len(self.workload["roles"])

    @property
    def input_length(self) -> int | None:
        """The length the workload is named after, in unscaled tokens: `input_length_4096`."""
        numbers = re.findall(r"\d+", str(self.workload["name"]))
        return int(numbers[-1]) if numbers else None

    @cached_property
    def survived(self) -> bool:
        """Every session completed, and so did the engines: no call refused, failed or left out."""
        if self.data.get("lost"):
            return False
        failed = any(call["error"] or call["status"] != 200 for call in self.calls)
        lost = any(self.figures.get(f"{how}_sessions") for how in ("rejected", "failed"))
        if failed or lost or not self.calls:
            return False
        return self.sent is None or len(self.calls) == self.sent.calls

    @cached_property
    def sent(self) -> traces.Workload | None:
        """The sessions, if their file lies beside the point."""
        name = self.data.get("workload_file")
        file = self.file.with_name(Path(name).name) if name else None
        return traces.read(file) if file is not None and file.is_file() else None


def read(folder: Path) -> list[Point]:
    """Every point in `folder` and below, in a fixed order. JSON without an experiment is no point.

    Raises ConfigError: no such folder, no point in it, or a file that cannot be a point.
    """
    if not folder.is_dir():
        raise ConfigError(
            Problem(str(folder), "is not a folder", "give the one that a run wrote its points to")
        )
    problems: list[Problem] = []
    points: list[Point] = []
    for file in sorted(folder.rglob("*.json")):
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            problems.append(Problem(str(file), f"is not JSON ({error})", _AGAIN))
            continue
        if not isinstance(data, dict) or "experiment" not in data:
            continue
        absent = [field for field in _FIELDS if field not in data]
        if absent:
            problems.append(Problem(str(file), f"lacks {', '.join(absent)}", _AGAIN))
        elif data["version"] != VERSION:
            what = f"has version {data['version']}, this program reads {VERSION}"
            problems.append(Problem(str(file), what, _AGAIN))
        else:
            points.append(Point(file, data))
    if problems:
        raise ConfigError(*problems)
    if not points:
        raise ConfigError(
            Problem(str(folder), "holds no measured point", "give one with measured points")
        )
    return sorted(points, key=_order)


def _order(point: Point) -> tuple[Any, ...]:
    return (
        point.experiment,
        point.system,
        point.workload["name"],
        point.rate or 0,
        point.limit or 0,
        point.repeat,
    )
