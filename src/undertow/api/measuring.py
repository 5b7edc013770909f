"""`measure`: the peak memory and the time of a step as the allocator and the clock saw them."""

from __future__ import annotations

from typing import Any

import torch

from undertow.api.training import TrainStep
from undertow.errors import CallError
from undertow.ir.structure import tensors_in
from undertow.runtime.measure import Measurement, measure_call


def measure(step: Any, *args: Any, **kwargs: Any) -> Measurement:
    """Run a step once for its peak and once for its time.

    `step` is what `train_step` returned, or a module, planned or not: of a module, forward and backward from a sum of
    its outputs. Gradients that exist are dropped first, and left as the step leaves them.
    """
    given = [tensor for _, tensor in tensors_in((args, kwargs))]
    if isinstance(step, TrainStep):
        return measure_call(lambda: step(*args, **kwargs), [*step.persistent_tensors(), *given])
    if not isinstance(step, torch.nn.Module):
        raise CallError(f"step must be a train_step or a module, got {type(step).__name__}")
    step.zero_grad(set_to_none=True)

    def call() -> None:
        outputs = [tensor for _, tensor in tensors_in(step(*args, **kwargs)) if tensor.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])

    return measure_call(call, [*step.parameters(), *step.buffers(), *given])
