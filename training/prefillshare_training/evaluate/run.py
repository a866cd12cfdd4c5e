"""An evaluation from its settings to a number: items, answers, scores, a result that is kept."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from prefillshare_server.errors import ConfigError, Problem
from prefillshare_server.models import checkpoint, store
from prefillshare_server.models.provenance import base_fingerprint, replace_file
from prefillshare_server.models.weights import digest
from prefillshare_training.data.rendering import Renderer
from prefillshare_training.evaluate import modes, tasks
from prefillshare_training.evaluate.answers import AnswersFile, Line, opened
from prefillshare_training.evaluate.bar import accuracy_bar
from prefillshare_training.evaluate.result import EvalResult, record, record_folder, summary
from prefillshare_training.evaluate.settings import EvalSettings, require_consistent, short_name

if TYPE_CHECKING:
    from prefillshare_training.evaluate.engine import Answer, Progress

__all__ = ["EvalResult", "EvalSettings", "evaluate"]


class _Generator(Protocol):
    """An `Engine` or a `Served`."""

    @property
    def context_length(self) -> int: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        stop_ids: Collection[int],
        progress: Progress | None,
    ) -> list[Answer]: ...


def evaluate(settings: EvalSettings, console: Console | None = None) -> EvalResult:
    """Answer and score every item that has no answer yet; blocks for as long as that takes.

    Each answer is in the file before the next is reported, so an evaluation that was stopped goes
    on where it was. Raises ConfigError for what the user can mend.
    """
    console = console or Console(stderr=True)
    task = tasks.make(settings.task, data=settings.data, match=settings.match)
    require_consistent(settings)
    base_dir = store.resolve(settings.base, progress=console.print)
    renderer = Renderer.for_base(base_dir, settings.layout)
    items = _chosen(task.items(renderer), settings)
    recorded = record_folder(settings)
    decoder_dir = _decoder(settings, base_dir, console)
    max_tokens = settings.max_tokens or task.max_tokens
    described = _described(settings, items.sha256, renderer, base_dir, decoder_dir, max_tokens)
    path = settings.items_path
    with opened(path, described, overwrite=settings.overwrite) as file:
        open_items = [item for item in items.chosen if item.key not in file.lines]
        if len(open_items) < len(items.chosen):
            console.print(f"{len(items.chosen) - len(open_items)} items are answered already")
        if open_items:
            generator = _generator(settings, base_dir, decoder_dir)
            work = _Work(task, renderer, items.chosen, file)
            title = f"{task.name} {settings.mode_name}"
            with accuracy_bar(console, title, len(items.chosen)) as report:
                work.answer(open_items, generator, max_tokens, report)
        lines = [file.lines[item.key] for item in items.chosen]
    result = summary(task.name, settings.mode_name, lines, path, described)
    text = json.dumps(result.to_json(), indent=2, ensure_ascii=False) + "\n"
    replace_file(path.with_suffix(".json"), text.encode())
    if recorded is not None:
        record(recorded, result)
    return result


@dataclass(frozen=True)
class _Items:
    chosen: list[tasks.Item]
    sha256: str
    """Of all items, chosen or not."""


@dataclass(frozen=True)
class _Work:
    """Answers become lines of the file."""

    task: tasks.Task
    renderer: Renderer
    items: Sequence[tasks.Item]
    """All that count, for the running accuracy."""
    file: AnswersFile

    def answer(
        self,
        items: Sequence[tasks.Item],
        generator: _Generator,
        max_tokens: int,
        report: Callable[[int, float], None],
    ) -> None:
        """Generate and score answers to `items`, and write each at once."""
        fitting = []
        for item in items:
            if len(item.prompt_ids) < generator.context_length:
                fitting.append(item)
            else:
                self._add(item, (), None, "no_room")

        known = (self.file.lines.get(item.key) for item in self.items)
        scores = [_first(line.scores) for line in known if line is not None]

        def finished(number: int, answer: Answer) -> None:
            item = fitting[number]
            self._add(item, answer.ids, sum(answer.logprobs), answer.finish)
            scores.append(_first(self.file.lines[item.key].scores))
            report(len(scores), 100 * sum(scores) / len(scores))

        if fitting:
            generator.generate(
                [item.prompt_ids for item in fitting],
                max_tokens=max_tokens,
                stop_ids=self.renderer.stop_ids,
                progress=finished,
            )

    def _add(
        self, item: tasks.Item, ids: tuple[int, ...], logprob: float | None, finish: str
    ) -> None:
        ended = bool(ids) and ids[-1] in self.renderer.stop_ids
        text = self.renderer.decode(ids[:-1] if ended else ids)
        self.file.add(
            Line(
                item=item.key,
                prompt_sha256=_prompt_sha256(item),
                prompt_tokens=len(item.prompt_ids),
                text=text,
                ids=ids,
                logprob=logprob,
                finish=finish,
                scores=dict(self.task.score(item, text)),
            )
        )


def _chosen(items: list[tasks.Item], settings: EvalSettings) -> _Items:
    """Items in an order of their own per seed, so that a limit is a fair draw."""
    keys = [item.key for item in items]
    if len(set(keys)) < len(keys):
        again = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise ConfigError(Problem(f"item {again!r}", "its id is there twice", "make ids unique"))
    if not items:
        raise ConfigError(Problem(settings.data or settings.task, "holds no items", "add some"))
    digest_of_all = hashlib.sha256()
    for item in items:
        line = json.dumps([item.key, item.prompt_ids, item.expected], sort_keys=True)
        digest_of_all.update(line.encode())
    order = list(items)
    random.Random(settings.seed).shuffle(order)
    return _Items(order[: settings.limit], digest_of_all.hexdigest())


def _decoder(settings: EvalSettings, base_dir: Path, console: Console) -> Path | None:
    """The full checkpoint that decodes; None when a server has it."""
    if settings.server is not None:
        return None
    if settings.decoder is None:
        return base_dir
    from prefillshare_training.evaluate.models import full_checkpoint

    directory = store.resolve(settings.decoder, progress=console.print)
    return full_checkpoint(base_dir, directory, console.print)


def _generator(settings: EvalSettings, base_dir: Path, decoder_dir: Path | None) -> _Generator:
    if settings.server is not None:
        from prefillshare_training.evaluate.served import Served

        assert settings.role is not None
        return Served(settings.server, settings.role, concurrency=settings.concurrency)
    from prefillshare_training.evaluate.engine import Engine

    return Engine(
        base_dir,
        decoder_dir,
        mode=modes.parse(settings.mode),
        dtype=settings.dtype,
        batch_size=settings.batch_size,
    )


def _described(
    settings: EvalSettings,
    items_sha256: str,
    renderer: Renderer,
    base_dir: Path,
    decoder_dir: Path | None,
    max_tokens: int,
) -> dict[str, Any]:
    """Everything that the answers and scores depend on; the same on every machine."""
    decoder: Any = {"server": settings.server, "role": settings.role}
    if decoder_dir is not None:
        decoder = {
            "name": short_name(settings.decoder or settings.base),
            "weights": digest(decoder_dir),
        }
    return {
        "task": settings.task,
        "match": settings.match,
        "mode": settings.mode_name,
        "base": {"name": short_name(settings.base), "fingerprint": base_fingerprint(base_dir)},
        "decoder": decoder,
        "layout": renderer.fingerprint,
        "items_sha256": items_sha256,
        "seed": settings.seed,
        "max_tokens": max_tokens,
        "dtype": settings.dtype if settings.dtype != "auto" else checkpoint.dtype(base_dir),
    }


def _prompt_sha256(item: tasks.Item) -> str:
    return hashlib.sha256(repr(item.prompt_ids).encode()).hexdigest()[:16]


def _first(scores: Mapping[str, float]) -> float:
    return next(iter(scores.values()))
