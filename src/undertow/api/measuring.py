"""`measure`: the peak memory and the time of a step, as the allocator and the clock see them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from undertow.api.training import TrainStep
from undertow.api.untouched import left_untouched
from undertow.errors import CallError
from undertow.ir import TensorType
from undertow.ir.structure import tensors_in
from undertow.record.lazy_modules import refuse_lazy
from undertow.record.losses import find_loss, is_scalar_tensor
from undertow.runtime.measure import Measurement, measure_call

MIN_SAMPLES, MAX_SAMPLES, SAMPLING_S = 3, 15, 0.5
LONG_S = 5.0  # after this much time fewer samples will do: long steps vary less


def measure(step: TrainStep | torch.nn.Module, *args: Any, **kwargs: Any) -> Measurement:
    """Run a step for its time, and once more under the profiler for its peak.

    `step` is what `train_step` returned, or a module, planned or not. A module runs forward and backward, from the
    outputs that its plan expects gradients from. Without a plan it runs backward from its own loss, or from the sum of
    its outputs where it returns no loss. It only runs forward where no output carries a gradient. The time is the
    median of several runs after a first one, which may plan. Afterwards parameters, buffers, gradients, the
    optimizer's state and generators are as they were.
    """
    if isinstance(step, TrainStep):
        with left_untouched(step.model, step.training):
            return _measure_step(step, args, kwargs)
    if not isinstance(step, torch.nn.Module):
        raise CallError(f"step must be a train_step or a module, got {type(step).__name__}")
    refuse_lazy(dict(step.named_modules()))
    with left_untouched(step):
        return _measure_module(step, args, kwargs)


def _measure_step(step: TrainStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Measurement:
    given = [tensor for _, tensor in tensors_in((args, kwargs))]
    seconds = find_median_time(lambda: step(*args, **kwargs), step.drop_gradients, step.decide_together)
    step.drop_gradients()
    step.release_arena()
    return replace(measure_call(lambda: step(*args, **kwargs), step.persistent_tensors(), given), step_s=seconds)


def _measure_module(step: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Measurement:
    given = [tensor for _, tensor in tensors_in((args, kwargs))]
    runner = getattr(step, "undertow_runner", None)
    find_carriers = _find_carriers if runner is None else runner.expected_outputs

    def call() -> None:
        carriers = find_carriers(step(*args, **kwargs))
        if carriers:
            total = _Sum.apply(*carriers)
            carriers.clear()
            total.backward(torch.empty(0))

    seconds = find_median_time(call, lambda: step.zero_grad(set_to_none=True))
    step.zero_grad(set_to_none=True)
    if runner is not None:
        runner.request.memory.release()
    return replace(measure_call(call, [*step.parameters(), *step.buffers()], given), step_s=seconds)


def _find_carriers(outputs: Any) -> list[torch.Tensor]:
    """The outputs that a loop would differentiate: the model's own loss, else all that carry a gradient."""
    loss = find_loss(outputs, is_scalar_tensor)
    return [tensor for _, tensor in tensors_in(outputs if loss is None else loss) if tensor.requires_grad]


class _Sum(torch.autograd.Function):
    """Stands for the user's loss: it keeps none of the outputs, and its backward makes a cotangent of ones for each."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.kinds = [TensorType.of(tensor).packed for tensor in tensors]
        return torch.empty(0)  # of no bytes

    @staticmethod
    def backward(ctx: Any, *cts: Any) -> Any:
        return tuple(
            torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=kind.device).fill_(1)
            for kind in ctx.kinds
        )


def find_median_time(
    call: Callable[[], Any], prepare: Callable[[], Any], decide: Callable[[bool], bool] = lambda answer: answer
) -> float:
    """The median time of several calls after a first one; `prepare` runs before each and is not timed.

    `decide` makes of each rank's answer one for all, since all have to make as many calls.
    """
    prepare()
    call()
    samples: list[float] = []
    while decide(_wants_more(samples)):
        prepare()
        samples.append(_time(call))
    return statistics.median(samples)


def _wants_more(samples: Sequence[float]) -> bool:
    if not samples or len(samples) == MAX_SAMPLES:
        return not samples
    return sum(samples) < (LONG_S if len(samples) < MIN_SAMPLES else SAMPLING_S)


def _time(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
