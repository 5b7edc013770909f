"""Loss and accuracy over a loader, by a planned forward pass in `eval()`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from undertow.api.planning import plan
from undertow.errors import CallError, DataError
from undertow.train.config import CLASS_LOSSES
from undertow.train.feeding import check_batch
from undertow.train.losses import make_loss

IGNORED = -100  # the label that the losses of torch.nn.functional skip


@dataclass(frozen=True)
class Evaluation:
    """Means over all examples; accuracy is None where outputs are not classes."""

    loss: float
    accuracy: float | None
    num_examples: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"test_loss": self.loss, "test_accuracy": self.accuracy, "examples": self.num_examples}

    def __str__(self) -> str:
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.2%}"
        return f"test loss {self.loss:.4f}{accuracy} ({self.num_examples:,} examples)"


class Evaluator:
    """Evaluates one model. Its forward pass is captured once for each shape of a batch."""

    def __init__(self, model: torch.nn.Module, loss_name: str, is_sequence: bool) -> None:
        self._model, self._is_sequence = model, is_sequence
        self._loss_name, self._loss = loss_name, make_loss(loss_name, is_sequence)
        self._planned: Any = None

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """The model's outputs in `eval()`."""
        with evaluating(self._model):
            if self._planned is None:
                self._planned = plan(self._model, (inputs,))
            return self._planned(inputs)

    def check_targets(self, outputs: Any, targets: torch.Tensor, what: str) -> int | None:
        """The number of classes if targets are labels; raises DataError if the loss does not take such targets."""
        if not isinstance(outputs, torch.Tensor):
            raise CallError(f"the model returns {type(outputs).__name__}, but the loss takes one tensor")
        class_dim = -1 if self._is_sequence else min(1, outputs.dim() - 1)
        shape = list(outputs.shape)
        is_label = self._loss_name in CLASS_LOSSES and not (
            targets.is_floating_point() and list(targets.shape) == shape  # probabilities
        )
        if is_label:
            del shape[class_dim]
        if list(targets.shape) != shape or targets.is_floating_point() == is_label:
            numbers = "whole numbers" if is_label else "floating-point numbers"
            raise DataError(
                f"{what}: for outputs of shape {list(outputs.shape)}, {self._loss_name} takes targets of shape "
                f"{shape}, {numbers}; found {targets.dtype} of shape {list(targets.shape)}"
            )
        return outputs.shape[class_dim] if is_label else None

    def evaluate(self, loader: Iterable[Any]) -> Evaluation:
        """Loss and accuracy over every batch."""
        loss_sum, num_right, num_judged, num_examples = 0.0, 0, 0, 0
        for index, batch in enumerate(loader):
            inputs, targets = check_batch(batch)
            outputs = self.predict(inputs)
            what = f"test data, batch {index + 1}"
            if (num_classes := self.check_targets(outputs, targets, what)) is not None:
                check_labels(targets, num_classes, what)
            loss_sum += float(self._loss(outputs, targets)) * len(targets)
            num_examples += len(targets)
            if (right := count_right(outputs, targets, self._is_sequence)) is not None:
                num_right, num_judged = num_right + right[0], num_judged + right[1]
        if not num_examples:
            raise DataError("there are no examples to evaluate on")
        accuracy = num_right / num_judged if num_judged else None
        return Evaluation(loss_sum / num_examples, accuracy, num_examples)


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


def count_right(outputs: torch.Tensor, targets: torch.Tensor, is_sequence: bool) -> tuple[int, int] | None:
    """How many predictions are right, and of how many; None where outputs are not classes."""
    if targets.is_floating_point() or outputs.dim() != targets.dim() + 1:
        return None
    predicted = outputs.argmax(-1 if is_sequence else 1)
    return int((predicted == targets).sum()), int((targets != IGNORED).sum())
