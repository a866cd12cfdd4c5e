"""Which results file comes of which experiment, and how it is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prefillshare_bench.report import mechanisms, serving, sweeps
from prefillshare_bench.report.points import Point


@dataclass(frozen=True)
class ResultsFile:
    """Made of the points of `experiment`; systems it lacks may come from other ones' points."""

    experiment: str
    build: Callable[[Sequence[Point]], dict[str, Any]]
    borrows: tuple[str, ...] = ()


FILES: Final[Mapping[str, ResultsFile]] = {
    "serving_react": ResultsFile("react", serving.serving),
    "serving_reflexion": ResultsFile("reflexion", serving.serving),
    "attribution": ResultsFile("attribution", mechanisms.attribution, borrows=("react",)),
    "prediction": ResultsFile(
        "prediction", mechanisms.prediction, borrows=("attribution", "react")
    ),
    "low_overlap": ResultsFile("low_overlap", sweeps.low_overlap),
    "concurrency": ResultsFile("concurrency", sweeps.concurrency),
    "input_length": ResultsFile("input_length", sweeps.input_length),
    "swarm": ResultsFile("swarm", sweeps.swarm),
    "roles_scaling": ResultsFile("roles_scaling", sweeps.roles_scaling),
    "memory": ResultsFile("memory", mechanisms.memory),
    "long_output": ResultsFile("long_output", sweeps.long_output),
}
"""By the name of the file, without its ending, in the order of the page."""


def results(points: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """The contents of every results file that `points` have an experiment for.

    Sessions of a user's own file are reported as the paper's are, under the experiment's name.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, file in FILES.items():
        own = [point for point in points if point.experiment == file.experiment]
        for lender in file.borrows:
            own += _borrowed(own, points, lender)
        if own:
            found[name] = file.build(own)
    known = {file.experiment for file in FILES.values()}
    for name in sorted({point.experiment for point in points} - known):
        found[name] = serving.serving([point for point in points if point.experiment == name])
    return found


def write(content: Mapping[str, Any], path: Path) -> None:
    """`content` as JSON: whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _borrowed(own: Sequence[Point], points: Sequence[Point], lender: str) -> list[Point]:
    """What `lender` measured of systems that `own` lacks, on the very same workloads if it has any.

    Tables 6 and 7 are rows of Fig. 4: nothing needs to be measured twice.
    """
    systems = {point.system for point in own}
    workloads = {point.workload.get("sha256") for point in own} - {None}
    return [
        point
        for point in points
        if point.experiment == lender
        and point.system not in systems
        and (not own or point.workload.get("sha256") in workloads)
    ]
