"""What came out of an evaluation, and where it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import store
from prefillshare_server.models.provenance import Provenance
from prefillshare_training.evaluate.answers import Line
from prefillshare_training.evaluate.score import Accuracy, accuracy

if TYPE_CHECKING:
    from prefillshare_training.evaluate.settings import EvalSettings


@dataclass(frozen=True)
class EvalResult:
    """What came out."""

    task: str
    mode: str
    """``served`` when a server generated."""
    n: int
    accuracy: float
    """Percent of the items, by the task's first metric."""
    ci95: tuple[float, float]
    """95 % Wilson score interval, in percent."""
    items_path: Path
    metrics: Mapping[str, Accuracy]
    """Every metric of the task."""
    cut: int
    """Answers that reached `max_tokens`; of a good model, few do."""
    no_room: int
    """Prompts that fill the context; they count as wrong."""
    settings: Mapping[str, Any]
    """What the answers depend on."""

    def to_json(self) -> dict[str, Any]:
        """Without this machine's paths."""
        return {
            "task": self.task,
            "mode": self.mode,
            "n": self.n,
            "accuracy": round(self.accuracy, 4),
            "ci95": [round(bound, 4) for bound in self.ci95],
            "metrics": {
                name: {
                    "accuracy": round(each.percent, 4),
                    "ci95": [round(each.low, 4), round(each.high, 4)],
                }
                for name, each in self.metrics.items()
            },
            "cut": self.cut,
            "no_room": self.no_room,
            "settings": dict(self.settings),
        }


def summary(
    task: str, mode: str, lines: Sequence[Line], path: Path, described: Mapping[str, Any]
) -> EvalResult:
    """The result of these answers, at least one."""
    metrics = {name: accuracy([line.scores[name] for line in lines]) for name in lines[0].scores}
    headline = next(iter(metrics.values()))
    return EvalResult(
        task=task,
        mode=mode,
        n=len(lines),
        accuracy=headline.percent,
        ci95=(headline.low, headline.high),
        items_path=path,
        metrics=metrics,
        cut=sum(line.finish == "length" for line in lines),
        no_room=sum(line.finish == "no_room" for line in lines),
        settings=described,
    )


def record_folder(settings: EvalSettings) -> Path | None:
    """Where the result is to be recorded; found out before hours of work."""
    if not settings.record or settings.decoder is None:
        return None
    directory = store.resolve(settings.decoder)
    if Provenance.read(directory) is None:
        raise ConfigError(
            Problem(
                str(directory),
                "has no prefillshare.json to record the result in",
                "leave out --record, or use a decoder that prefillshare train made",
            )
        )
    return directory


def record(directory: Path, result: EvalResult) -> None:
    """Append the result; it takes the place of an earlier one of the same evaluation."""
    provenance = Provenance.read(directory)
    assert provenance is not None
    entry = result.to_json()
    kept = [
        each
        for each in provenance.evaluation
        if (each.get("settings"), each.get("n")) != (entry["settings"], entry["n"])
    ]
    replace(provenance, evaluation=(*kept, entry)).write(directory)
