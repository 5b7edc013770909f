"""How a run shows its progress: a live line on a terminal, plain lines elsewhere. Everything goes to stderr."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TextIO

from undertow.ir import format_bytes

PLAIN_INTERVAL_S = 10.0


@dataclass(frozen=True)
class StepView:
    """What is shown of a step. `num_examples` counts the examples since the last call of `show`."""

    step: int
    num_steps: int
    epoch: int
    num_epochs: int
    loss: float
    num_examples: int
    peak_bytes: int | None
    budget_bytes: int | None

    @property
    def peak(self) -> str:
        """Peak against budget."""
        peak = "" if self.peak_bytes is None else format_bytes(self.peak_bytes)
        return peak if self.budget_bytes is None else f"{peak} of {format_bytes(self.budget_bytes)}"


class Display(ABC):
    """Shows a run."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Print a line that stays."""

    @abstractmethod
    def show(self, view: StepView) -> None:
        """Show a step that was done."""

    @abstractmethod
    def close(self) -> None:
        """End the display."""


class Silent(Display):
    """Shows nothing."""

    def say(self, line: str) -> None: ...

    def show(self, view: StepView) -> None: ...

    def close(self) -> None: ...


class Lines(Display):
    """A line every few seconds, for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last_s = time.perf_counter()
        self._num_examples = 0

    def say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def show(self, view: StepView) -> None:
        self._num_examples += view.num_examples
        now = time.perf_counter()
        if now - self._last_s < PLAIN_INTERVAL_S:
            return
        rate = self._num_examples / (now - self._last_s)
        self._last_s, self._num_examples = now, 0
        self.say(
            f"epoch {view.epoch + 1}/{view.num_epochs}  step {view.step}/{view.num_steps}  loss {view.loss:.4f}  "
            f"{rate:.0f} examples/s  {view.peak}".rstrip()
        )

    def close(self) -> None: ...


class Live(Display):
    """A line that is drawn again at every step, with the time that is left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=12),
            TextColumn("step {task.completed}/{task.total}"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]}/s"),
            TextColumn("{task.fields[peak]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: TaskID | None = None
        self._start_s, self._num_examples = 0.0, 0

    def say(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)

    def show(self, view: StepView) -> None:
        now = time.perf_counter()
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task("", total=view.num_steps, epoch="", loss="", rate="", peak="")
            self._start_s = now
        self._num_examples += view.num_examples
        rate = self._num_examples / (now - self._start_s) if now > self._start_s else 0.0
        self._progress.update(
            self._task,
            completed=view.step,
            epoch=f"{view.epoch + 1}/{view.num_epochs}",
            loss=f"{view.loss:.4f}",
            rate=f"{rate:.0f}",
            peak=view.peak,
        )

    def close(self) -> None:
        self._progress.stop()


def make_display() -> Display:
    """The display that suits stderr."""
    return Live() if sys.stderr.isatty() else Lines(sys.stderr)
