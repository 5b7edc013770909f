"""Loss and accuracy over a loader, by a planned forward pass in `eval()`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from undertow.api.planning import plan
from undertow.errors import DataError
from undertow.train.feeding import check_batch
from undertow.train.losses import make_loss


@dataclass(frozen=True)
class Evaluation:
    """Means over all examples; accuracy is None where outputs are no classes."""

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
    """Evaluates one model; its forward pass is captured once for each shape of batch."""

    def __init__(self, model: torch.nn.Module, loss_name: str, is_sequence: bool) -> None:
        self._model, self._is_sequence = model, is_sequence
        self._loss = make_loss(loss_name, is_sequence)
        self._planned: Any = None

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """The model's outputs as it gives them in `eval()`."""
        with evaluating(self._model):
            if self._planned is None:
                self._planned = plan(self._model, (inputs,))
            return self._planned(inputs)

    def evaluate(self, loader: Iterable[Any]) -> Evaluation:
        """Loss and accuracy over every batch."""
        loss_sum, num_right, num_judged, num_examples = 0.0, 0, 0, 0
        for batch in loader:
            inputs, targets = check_batch(batch)
            outputs = self.predict(inputs)
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
    """`eval()` without gradients; afterwards each module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def count_right(outputs: torch.Tensor, targets: torch.Tensor, is_sequence: bool) -> tuple[int, int] | None:
    """How many predictions are right, of how many; None where outputs are no classes."""
    if targets.is_floating_point() or outputs.dim() != targets.dim() + 1:
        return None
    predicted = outputs.argmax(-1 if is_sequence else 1)
    return int((predicted == targets).sum()), targets.numel()
