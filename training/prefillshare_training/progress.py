"""A progress bar for a training run: step, loss, learning rate, tokens per second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import TrainerControl, TrainerState, TrainingArguments

_LINE_EVERY_S = 30.0


class ShowProgress(TrainerCallback):
    """A bar on a terminal; on a pipe, a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[news]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=None, news="")
        self._said = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start the bar where a resumed run goes on."""
        self._bar.update(self._task, total=state.max_steps, completed=state.global_step)
        self._bar.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Advance by an optimizer step."""
        self._bar.update(self._task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Show the latest loss."""
        shown = {"loss": "loss {:.4f}", "eval_loss": "validation loss {:.4f}"}
        shown |= {"learning_rate": "lr {:.2e}"}
        news = "  ".join(
            text.format(float(logs[key])) for key, text in shown.items() if logs and key in logs
        )
        if not news:
            return
        self._bar.update(self._task, news=news)
        if not self._console.is_terminal and time.monotonic() - self._said > _LINE_EVERY_S:
            self._said = time.monotonic()
            step = f"step {state.global_step}/{state.max_steps}"
            self._console.print(f"train  {step}  {news}", highlight=False)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Leave the finished bar on the screen."""
        self.stop()

    def stop(self) -> None:
        """End the bar, also after an error."""
        self._bar.stop()
