"""What evaluation counts besides the loss: accuracy, top-5, F1, the confusion matrix, perplexity, errors of numbers.

In: the outputs and targets of one batch after the other. Out: numbers over all of them. A user's metric is a function
of outputs and targets, whose mean over examples is taken, or an object with `update` and `compute`, as those of the
torchmetrics library.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from undertow.errors import CallError

IGNORED = -100  # the label that the losses of torch.nn.functional skip
MAX_CONFUSED = 1000  # classes: the matrix has their square
TOP = 5
CLASS_METRICS = ("f1", "confusion", f"top{TOP}")


@dataclass(frozen=True)
class Judged:
    """The outputs of one batch beside what was wanted: scores of classes with labels, or numbers with numbers."""

    outputs: Any
    targets: tuple[Any, ...]
    num_examples: int
    class_dim: int | None = None  # of the scores; None where outputs are not classes

    @property
    def labels(self) -> torch.Tensor:
        """The labels, without those that are ignored."""
        labels = self.targets[0].reshape(-1)
        return labels[labels != IGNORED]

    @property
    def scores(self) -> torch.Tensor:
        """A row of scores for each label."""
        assert self.class_dim is not None
        rows = self.outputs.movedim(self.class_dim, -1).reshape(-1, self.outputs.shape[self.class_dim])
        return rows[self.targets[0].reshape(-1) != IGNORED]


class Metric(ABC):
    """Takes in batches; gives numbers by name."""

    @abstractmethod
    def add(self, batch: Judged) -> None:
        """Take in a batch."""

    @abstractmethod
    def compute(self) -> dict[str, Any]:
        """The numbers over all batches so far; empty where the metric does not apply to such batches."""


class Confusion(Metric):
    """How often each class was taken for each: accuracy, F1 and the matrix are read off it."""

    def __init__(self, shown: Sequence[str]) -> None:
        self._shown = shown
        self._counts: torch.Tensor | None = None

    def add(self, batch: Judged) -> None:
        if batch.class_dim is None:
            return
        num_classes = batch.outputs.shape[batch.class_dim]
        if num_classes > MAX_CONFUSED:
            raise CallError(
                f"--metrics {','.join(self._shown)}: the model has {num_classes:,} classes, and the matrix is counted "
                f"for at most {MAX_CONFUSED:,}"
            )
        labels, found = batch.labels, batch.scores.argmax(1)
        counts = torch.bincount(labels * num_classes + found, minlength=num_classes**2).cpu()
        self._counts = counts if self._counts is None else self._counts + counts

    def compute(self) -> dict[str, Any]:
        if self._counts is None:
            return {}
        size = math.isqrt(len(self._counts))
        matrix = self._counts.view(size, size)
        right, given, found = matrix.diagonal().double(), matrix.sum(1).double(), matrix.sum(0).double()
        is_there = (given + found) > 0
        # F1 = 2 right / (given + found); the mean is over classes that are there.
        f1 = float((2 * right / (given + found))[is_there].mean()) if bool(is_there.any()) else math.nan
        numbers: dict[str, Any] = {"f1": f1} if "f1" in self._shown else {}
        return numbers | ({"confusion": matrix.tolist()} if "confusion" in self._shown else {})


class Top(Metric):
    """The share of labels among the five likeliest classes."""

    def __init__(self) -> None:
        self._num_right = self._num_judged = 0

    def add(self, batch: Judged) -> None:
        if batch.class_dim is None:
            return
        scores, labels = batch.scores, batch.labels
        best = scores.topk(min(TOP, scores.shape[1]), dim=1).indices
        self._num_right += int((best == labels[:, None]).sum())
        self._num_judged += len(labels)

    def compute(self) -> dict[str, Any]:
        return {f"top{TOP}": self._num_right / self._num_judged} if self._num_judged else {}


class Errors(Metric):
    """Of numbers: the mean absolute error, the root of the mean square, and the share of the variance explained."""

    def __init__(self) -> None:
        self._num = 0
        self._absolute = self._square = self._sum = self._sum_square = 0.0

    def add(self, batch: Judged) -> None:
        is_number = batch.class_dim is None and len(batch.targets) == 1 and isinstance(batch.outputs, torch.Tensor)
        if not is_number or batch.outputs.shape != batch.targets[0].shape:
            return
        wanted = batch.targets[0].double()
        error = batch.outputs.double() - wanted
        self._num += error.numel()
        self._absolute += float(error.abs().sum())
        self._square += float(error.square().sum())
        self._sum += float(wanted.sum())
        self._sum_square += float(wanted.square().sum())

    def compute(self) -> dict[str, Any]:
        if not self._num:
            return {}
        variance = self._sum_square - self._sum**2 / self._num
        explained = {"r2": 1 - self._square / variance} if variance > 0 else {}
        return {"mae": self._absolute / self._num, "rmse": math.sqrt(self._square / self._num), **explained}


class UserMetric(Metric):
    """A user's function, or an object with `update` and `compute`."""

    def __init__(self, name: str, made: Any) -> None:
        self._name, self._made = name, made
        self._sum, self._num = 0.0, 0
        if hasattr(made, "reset"):
            made.reset()

    def add(self, batch: Judged) -> None:
        if hasattr(self._made, "update"):
            self._run(self._made.update, batch.outputs, *batch.targets)
            return
        value = _as_number(self._run(self._made, batch.outputs, *batch.targets), self._name)
        self._sum, self._num = self._sum + value * batch.num_examples, self._num + batch.num_examples

    def compute(self) -> dict[str, Any]:
        if hasattr(self._made, "compute"):
            return {self._name: _as_number(self._run(self._made.compute), self._name)}
        return {self._name: self._sum / self._num} if self._num else {}

    def _run(self, function: Callable[..., Any], *values: Any) -> Any:
        try:
            return function(*values)
        except Exception as error:
            place = find_line(error)
            raise CallError(f"the metric {self._name} failed: {type(error).__name__}: {error}{place}") from error


def find_line(error: BaseException) -> str:
    """The innermost line of an error, in brackets."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" ({trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno})"


def _as_number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise CallError(f"the metric {name} must give a number, got {type(value).__name__}") from None


def make_metrics(names: Sequence[str], users: Sequence[tuple[str, Any]]) -> list[Metric]:
    """The metrics of one evaluation: by name, and a user's functions or factories by theirs."""
    shown = [name for name in ("f1", "confusion") if name in names]
    metrics: list[Metric] = [Confusion(shown)] if shown else []
    metrics += [Top()] if f"top{TOP}" in names else []
    metrics += [Errors()] if "errors" in names else []
    return metrics + [UserMetric(name, make_user_metric(made)) for name, made in users]


def make_user_metric(made: Any) -> Any:
    """An object with `update`, or a function of outputs and targets; a factory is called, for a new one each time."""
    if hasattr(made, "update") and not inspect.isclass(made):
        return made
    needed = [
        item
        for item in inspect.signature(made).parameters.values()
        if item.default is item.empty and item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)
    ]
    return made if needed else made()
