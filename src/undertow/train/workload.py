"""What is trained: a model, batches to train on and to test on, and how a new input becomes one of the model's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from undertow.data.examples import Examples, Source
from undertow.data.preparation import Preparation
from undertow.errors import DataError
from undertow.train.evaluation import Evaluator, check_labels
from undertow.train.feeding import make_test_loader, make_train_loader


@dataclass(frozen=True)
class Workload:
    """`preparation` and `classes` are None where the data's own factory made the loaders."""

    model: torch.nn.Module
    train_loader: Iterable[Any]
    test_loader: Iterable[Any]
    preparation: Preparation | None = None
    classes: tuple[str, ...] | None = None

    @property
    def is_sequence(self) -> bool:
        """Whether the model predicts the next character at every place."""
        return self.preparation is not None and self.preparation.vocabulary is not None

    def describe(self) -> dict[str, Any]:
        """What it takes to read a new input, as plain data."""
        preparation = None if self.preparation is None else self.preparation.to_dict()
        return {"preparation": preparation, "classes": None if self.classes is None else list(self.classes)}


def make_workload(model: torch.nn.Module, source: Source, batch: int) -> Workload:
    """A model on examples; raises DataError if there are fewer than a batch."""
    if len(source.train) < batch:
        raise DataError(f"there are {len(source.train)} training examples, fewer than a batch of {batch}")
    loaders = make_train_loader(source.train, batch), make_test_loader(source.test, batch)
    return Workload(model, *loaders, source.preparation, source.classes)


def check_workload(workload: Workload, evaluator: Evaluator, batch: tuple[torch.Tensor, torch.Tensor]) -> int | None:
    """Run the model once, and raise DataError if the targets are not for it; the number of classes, if any."""
    outputs = evaluator.predict(batch[0])
    num_classes = evaluator.check_targets(outputs, batch[1], "test data")
    for loader, what in ((workload.train_loader, "training data"), (workload.test_loader, "test data")):
        examples = getattr(loader, "dataset", None)
        if num_classes is not None and isinstance(examples, Examples):
            check_labels(examples.targets, num_classes, what)
    return num_classes
