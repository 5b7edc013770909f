"""A loss function from its name in `torch.nn.functional`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


def make_loss(name: str, is_sequence: bool, accumulate: int = 1) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """The loss of outputs and targets: over all positions of a sequence, divided by the batches of an accumulation."""
    function = getattr(functional, name)

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        if is_sequence:
            outputs, targets = outputs.flatten(0, 1), targets.flatten()
        value = function(outputs, targets)
        return value if accumulate == 1 else value / accumulate

    return loss
