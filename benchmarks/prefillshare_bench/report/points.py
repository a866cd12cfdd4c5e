"""Measured points, as a run left them in a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prefillshare_bench import traces
from prefillshare_server.errors import ConfigError, Problem

VERSION = 1
_FIELDS = ("version", "experiment", "system", "repeat", "figures", "calls", "workload", "about")
_OF_WORKLOAD = ("name", "seed", "roles")
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
    points: dict[tuple[Any, ...], Point] = {}
    for file in sorted(folder.rglob("*.json")):
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            problems.append(Problem(str(file), f"is not JSON ({error})", _AGAIN))
            continue
        if not isinstance(data, dict) or "experiment" not in data:
            continue
        absent = [field for field in _FIELDS if field not in data]
        absent += [f"workload.{field}" for field in _OF_WORKLOAD if field not in _workload(data)]
        if absent:
            problems.append(Problem(str(file), f"lacks {', '.join(absent)}", _AGAIN))
        elif data["version"] != VERSION:
            what = f"has version {data['version']}, this program reads {VERSION}"
            problems.append(Problem(str(file), what, _AGAIN))
        else:
            point = Point(file, data)
            if (other := points.setdefault(_order(point), point)) is not point:
                what = f"is the same measurement as {other.file}"
                problems.append(Problem(str(file), what, "leave one of them in the folder"))
    if problems:
        raise ConfigError(*problems)
    if not points:
        raise ConfigError(
            Problem(str(folder), "holds no measured point", "give one with measured points")
        )
    problems = [_mixed(name) for name in sorted(_in_both_loops(points.values()))]
    if problems:
        raise ConfigError(*problems)
    return [points[order] for order in sorted(points)]


def _in_both_loops(points: Iterable[Point]) -> set[str]:
    """Experiments of which some points were measured at a rate, and some in a closed loop."""
    rates: dict[str, set[bool]] = {}
    for point in points:
        rates.setdefault(point.experiment, set()).add(point.rate is None)
    return {name for name, found in rates.items() if len(found) > 1}


def _mixed(experiment: str) -> Problem:
    what = "was measured at rates of arrival and in a closed loop, which have no axis in common"
    return Problem(experiment, what, "give each an --out of its own, and report them apart")


def _workload(data: Mapping[str, Any]) -> Mapping[str, Any]:
    found = data.get("workload")
    return found if isinstance(found, Mapping) else {}


def _order(point: Point) -> tuple[Any, ...]:
    return (
        point.experiment,
        point.system,
        point.workload["name"],
        point.rate or 0,
        point.limit or 0,
        point.repeat,
        point.workload["seed"],
    )
