"""Loss, accuracy and metrics over a loader, by a planned forward pass in `eval()`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from undertow.api.planning import plan
from undertow.errors import CallError, DataError
from undertow.report.columns import align, line_columns, wrap
from undertow.report.run_confusion import MAX_CLASSES
from undertow.train.batches import Batch
from undertow.train.devices import Batches
from undertow.train.metrics import CLASS_METRICS, IGNORED, Judged, make_metrics
from undertow.train.objective import Objective

PERPLEXITY = "perplexity"
MAX_CONFUSED_SHOWN = 10


@dataclass(frozen=True)
class Evaluation:
    """Means over all examples; accuracy is None where outputs are not classes. `part` is test or validation."""

    loss: float
    accuracy: float | None
    num_examples: int
    part: str = "test"
    metrics: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        numbers = {f"{self.part}_loss": self.loss, f"{self.part}_accuracy": self.accuracy}
        metrics = {"metrics": self.metrics} if self.metrics else {}
        return {**numbers, "examples": self.num_examples, **metrics}

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics that are single numbers."""
        return {name: value for name, value in self.metrics.items() if isinstance(value, float)}

    @property
    def tables(self) -> dict[str, Any]:
        """The metrics that are recorded as tables: a matrix of few classes. One of many would outgrow the records."""
        matrix = self.metrics.get("confusion")
        return {"confusion": matrix} if matrix is not None and len(matrix) <= MAX_CLASSES else {}

    @property
    def line(self) -> str:
        """All single numbers in a line."""
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.2%}"
        shown = "".join(f", {name} {value:.4g}" for name, value in self.numbers.items())
        return f"{self.part} loss {self.loss:.4f}{accuracy}{shown} ({self.num_examples:,} examples)"

    def __str__(self) -> str:
        return "\n".join([*_matrix_lines(self.metrics.get("confusion")), wrap(self.line)])


def _matrix_lines(matrix: list[list[int]] | None) -> list[str]:
    """The confusion matrix, a row for each class that was wanted; of many classes, those confused most often."""
    if not matrix:
        return []
    width = max(len(str(count)) for row in matrix for count in row) + 1
    if 6 + width * len(matrix) <= line_columns():
        rows = [f"{index:>5}:" + "".join(f"{count:>{width}}" for count in row) for index, row in enumerate(matrix)]
        return ["wanted (rows) and found (columns):", *rows]
    wrong = [(-n, row, column) for row, counts in enumerate(matrix) for column, n in enumerate(counts) if row != column]
    shown = [(str(row), str(column), str(-n)) for n, row, column in sorted(wrong)[:MAX_CONFUSED_SHOWN] if n]
    head = "confused most often; --json has the whole matrix"
    return [head, align([("wanted", "found", "times"), *shown], ">>>")] if shown else ["no class was confused"]


class Evaluator:
    """Evaluates one model on its device. Its forward pass is captured once for each shape of a batch."""

    def __init__(
        self,
        model: torch.nn.Module,
        objective: Objective,
        device: torch.device,
        numerics: str = "exact",
        metrics: Sequence[str] = (),
        users: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._model, self._objective, self._device = model, objective, device
        # Evaluation on a GPU takes as long as training if it runs in float32.
        self._numerics = numerics if device.type == "cuda" else "exact"
        self._metrics, self._users = metrics, users
        self._planned: Any = None

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs in `eval()`."""
        with evaluating(self._model):
            if self._planned is None:
                self._planned = plan(self._model, args, kwargs, numerics=self._numerics)
            return self._planned(*args, **kwargs)

    def check_targets(self, outputs: Any, targets: tuple[Any, ...], what: str) -> int | None:
        """The number of classes if targets are labels; raises DataError if the loss does not take such targets."""
        objective = self._objective
        if not targets or objective.function is not None:
            return None
        if not isinstance(outputs, torch.Tensor):
            raise CallError(
                f"the model returns {type(outputs).__name__}, but {objective.title} takes one tensor: give a loss of "
                f"your own, --loss file.py:function, which is called with the outputs and all targets"
            )
        if len(targets) != 1 or not isinstance(targets[0], torch.Tensor):
            return None  # the loss says what is wrong
        target, class_dim = targets[0], self._find_class_dim(outputs)
        shape = list(outputs.shape)
        is_label = objective.is_of_classes and not (
            target.is_floating_point() and list(target.shape) == shape  # probabilities
        )
        if is_label:
            del shape[class_dim]
        if list(target.shape) != shape or target.is_floating_point() == is_label:
            numbers = "whole numbers" if is_label else "floating-point numbers"
            advice = (
                "for regression give --loss mse_loss" if is_label else f"or let the model return {list(target.shape)}"
            )
            raise DataError(
                f"{what}: for outputs of shape {list(outputs.shape)}, {objective.title} takes targets of shape "
                f"{shape}, {numbers}; found {target.dtype} of shape {list(target.shape)}: change the data, {advice}"
            )
        return outputs.shape[class_dim] if is_label else None

    def check_metrics(self, outputs: Any, batch: Batch) -> None:
        """Raise CallError if a metric is of classes, and the outputs are not scores of classes."""
        wanted = [name for name in self._metrics if name in CLASS_METRICS]
        if wanted and self._judge(outputs, batch).class_dim is None:
            raise CallError(
                f"--metrics {wanted[0]}: it counts classes, but what the model returns is not scores of classes for "
                f"such targets; leave it out, or give a metric of your own, --metric file.py:function"
            )

    def _find_class_dim(self, outputs: torch.Tensor) -> int:
        return outputs.dim() - 1 if self._objective.is_sequence else min(1, outputs.dim() - 1)

    def evaluate(self, loader: Iterable[Any], part: str = "test") -> Evaluation:
        """Loss, accuracy and metrics over every batch."""
        metrics = make_metrics(self._metrics, self._users)
        loss_sum, num_right, num_judged, num_examples = 0.0, 0, 0, 0
        batches = Batches(iter(loader), self._objective.read, self._device)
        for index, batch in enumerate(batches):
            outputs = self.predict(*batch.args, **batch.kwargs)
            batches.fetch()
            what = f"{part} data, batch {index + 1}"
            if (num_classes := self.check_targets(outputs, batch.targets, what)) is not None:
                check_labels(batch.targets[0], num_classes, what)
            with torch.no_grad():
                loss_sum += float(self._objective.evaluation_loss(outputs, batch.targets)) * batch.num_examples
            num_examples += batch.num_examples
            judged = self._judge(outputs, batch)
            if judged.class_dim is not None:
                num_right += int((judged.scores.argmax(1) == judged.labels).sum())
                num_judged += len(judged.labels)
            for metric in metrics:
                metric.add(judged)
        if not num_examples:
            raise DataError("there are no examples to evaluate on")
        accuracy = num_right / num_judged if num_judged else None
        loss = loss_sum / num_examples
        found = {name: value for metric in metrics for name, value in metric.compute().items()}
        if PERPLEXITY in self._metrics:
            found[PERPLEXITY] = float(torch.tensor(loss, dtype=torch.float64).exp())
        return Evaluation(loss, accuracy, num_examples, part, found)

    def _judge(self, outputs: Any, batch: Batch) -> Judged:
        """What metrics look at. A model with its own loss may give scores of classes beside it."""
        if not batch.targets:
            scores = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
            labels = batch.kwargs.get("labels")
            if isinstance(scores, torch.Tensor) and isinstance(labels, torch.Tensor):
                is_of_classes = scores.dim() == 2 and labels.dim() == 1 and not labels.is_floating_point()
                return Judged(scores, (labels,), batch.num_examples, 1 if is_of_classes else None)
            return Judged(outputs, (), batch.num_examples)
        target = batch.targets[0]
        is_of_classes = (
            len(batch.targets) == 1
            and isinstance(outputs, torch.Tensor)
            and isinstance(target, torch.Tensor)
            and not target.is_floating_point()
            and outputs.dim() == target.dim() + 1
        )
        return Judged(
            outputs, batch.targets, batch.num_examples, self._find_class_dim(outputs) if is_of_classes else None
        )


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Sets `eval()` and disables gradients; afterwards each module gets its mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def check_labels(targets: torch.Tensor, num_classes: int, what: str) -> None:
    """Raise DataError if a label is not a class of the model."""
    flat = targets.reshape(-1)
    wrong = (flat != IGNORED) & ((flat < 0) | (flat >= num_classes))
    if wrong.any():
        index = int(wrong.nonzero()[0])
        raise DataError(
            f"{what}: the label of example {index // max(targets[0].numel(), 1)} is {int(flat[index])}, out of range: "
            f"the model has {num_classes} outputs"
        )
