"""The loss of a run: a function of `torch.nn.functional` by name, a user's function, or the model's own.

In training it may weigh classes, smooth labels, and is divided by the batches of an accumulation. In evaluation it is
the plain loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from undertow.errors import CallError
from undertow.record.losses import find_loss, is_scalar_tensor
from undertow.train.batches import Batch, read_batch
from undertow.train.config import CLASS_LOSSES

DEFAULT_LOSS = "cross_entropy"  # of batches that have targets


@dataclass(frozen=True)
class Objective:
    """How batches are read, and what their loss is. `name` is None where batches decide: see `batches.py`."""

    name: str | None = None
    function: Callable[..., torch.Tensor] | None = None  # a user's own
    target_names: tuple[str, ...] = ()
    is_sequence: bool = False
    label_smoothing: float = 0.0
    class_weights: torch.Tensor | None = None
    accumulate: int = 1

    @property
    def title(self) -> str:
        """The loss in words; of batches with targets."""
        return self.name or DEFAULT_LOSS

    @property
    def is_of_classes(self) -> bool:
        """Whether targets may be labels of classes."""
        return self.function is None and self.title in CLASS_LOSSES

    def read(self, raw: Any) -> Batch:
        """The batch that a loader gave."""
        return read_batch(raw, self.name, self.target_names)

    def training_loss(self, outputs: Any, *targets: Any) -> torch.Tensor:
        """The loss that is differentiated."""
        options: dict[str, Any] = {}
        if self.class_weights is not None:
            options["weight"] = self.class_weights
        if self.label_smoothing:
            options["label_smoothing"] = self.label_smoothing
        loss = self._find_loss(outputs, targets, options)
        return loss if self.accumulate == 1 else loss / self.accumulate

    def evaluation_loss(self, outputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        """The loss that is reported: without class weights and smoothing, of one batch."""
        return self._find_loss(outputs, targets, {})

    def _find_loss(self, outputs: Any, targets: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
        if not targets:
            return find_own_loss(outputs)
        if self.function is not None:
            return self.function(outputs, *targets)
        if len(targets) != 1:
            raise CallError(
                f"{self.title} takes one target, and a batch has {len(targets)}: give a loss of your "
                f"own, --loss file.py:function, which is called with the outputs and all targets"
            )
        (target,) = targets
        function = partial(getattr(functional, self.title), **options)
        if self.is_sequence:
            return function(outputs.flatten(0, 1), target.flatten())
        return function(outputs, target)


def find_own_loss(outputs: Any) -> torch.Tensor:
    """The loss that a model returned; raises CallError if there is none."""
    loss = find_loss(outputs, is_scalar_tensor)
    if loss is None:
        # Without gradients, as in evaluation, a scalar is told by its shape alone.
        loss = find_loss(outputs, lambda item: isinstance(item, torch.Tensor) and item.dim() == 0)
    if not isinstance(loss, torch.Tensor):
        raise CallError(
            f"the model returns {type(outputs).__name__} without a loss of its own: a scalar alone, as .loss, or first "
            f"in a tuple; name targets with --targets, or let the loader give pairs of inputs and targets"
        )
    return loss
