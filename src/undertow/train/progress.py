"""How a run shows its progress: a live line on a terminal, plain lines elsewhere. Everything goes to stderr."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TextIO

from undertow.ir import format_bytes
from undertow.report.columns import wrap

PLAIN_INTERVAL_S = 10.0
BAR_COLUMNS = 12


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
    served: str = ""  # about workers and servers, where there are some

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
        print(fit(line), file=self._stream, flush=True)

    def show(self, view: StepView) -> None:
        self._num_examples += view.num_examples
        now = time.perf_counter()
        if now - self._last_s < PLAIN_INTERVAL_S:
            return
        rate = self._num_examples / (now - self._last_s)
        self._last_s, self._num_examples = now, 0
        self.say(
            f"epoch {view.epoch + 1}/{view.num_epochs}  step {view.step}/{view.num_steps}  loss {view.loss:.4f}  "
            f"{rate:.0f} examples/s  {view.peak}  {view.served}".rstrip()
        )

    def close(self) -> None: ...


class Live(Display):
    """A line that is drawn again at every step, with the time that is left; a narrow terminal gets less of it."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._progress: Any = None
        self._task: Any = None
        self._start_s, self._num_examples = 0.0, 0

    def say(self, line: str) -> None:
        self._console.print(fit(line), markup=False, highlight=False)

    def show(self, view: StepView) -> None:
        now = time.perf_counter()
        if self._progress is None:
            self._start(view)
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
            served=view.served,
        )

    def _start(self, view: StepView) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = {
            "epoch": TextColumn("epoch {task.fields[epoch]}"),
            "bar": BarColumn(bar_width=BAR_COLUMNS),
            "step": TextColumn("step {task.completed}/{task.total}"),
            "loss": TextColumn("loss {task.fields[loss]}"),
            "rate": TextColumn("{task.fields[rate]}/s"),
            "peak": TextColumn("{task.fields[peak]}"),
            "served": TextColumn("{task.fields[served]}"),
            "time": TimeRemainingColumn(),
        }
        shown = choose_columns(view, self._console.width)
        self._progress = Progress(*(column for name, column in columns.items() if name in shown), console=self._console)
        self._progress.start()
        self._task = self._progress.add_task("", total=view.num_steps, epoch="", loss="", rate="", peak="", served="")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def fit(text: str) -> str:
    """The text in lines that fit; its own lines stay lines."""
    return "\n".join(map(wrap, text.splitlines()))


def choose_columns(view: StepView, num_characters: int) -> list[str]:
    """The columns of the live line that fit, the most important ones first."""
    widths = {
        "step": len(f"step {view.num_steps}/{view.num_steps}"),
        "loss": len(f"loss {view.loss:.4f}"),
        "time": len("0:00:00"),
        "epoch": len(f"epoch {view.num_epochs}/{view.num_epochs}"),
        "peak": len(view.peak),
        "rate": len("10000/s"),
        "bar": BAR_COLUMNS,
    } | ({"served": len(view.served)} if view.served else {})
    chosen: list[str] = []
    for name in widths:
        if sum(widths[item] + 1 for item in (*chosen, name)) - 1 <= num_characters:
            chosen.append(name)
    return chosen


def make_display() -> Display:
    """The display that suits stderr."""
    return Live() if sys.stderr.isatty() else Lines(sys.stderr)
