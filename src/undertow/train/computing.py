"""What a worker of a parameter server computes: the gradients of one batch of a run, by its number.

In: a run's options, its model and data. Out: gradients, handed over one by one; the loss. The order of the data and the
generators' seeds follow from the number alone, so it does not matter which worker computes which batch, or how often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from undertow.api.budgets import parse_budget
from undertow.api.sharding import shard_seed
from undertow.api.training import TrainStep, train_step
from undertow.errors import CallError
from undertow.hashing import hash_tensors
from undertow.ops.sending import SendGradients
from undertow.train.batches import Batch
from undertow.train.config import TrainConfig
from undertow.train.feeding import Feed
from undertow.train.objective import Objective
from undertow.train.workload import Workload


@dataclass(frozen=True)
class Numbering:
    """How batches are numbered through all epochs, and how many make an update."""

    batches_per_epoch: int
    round_size: int
    is_synchronous: bool

    def place(self, number: int) -> tuple[int, int]:
        """The epoch of a batch, and its number within."""
        return divmod(number, self.batches_per_epoch)

    def step_of(self, number: int) -> int:
        """The update that a batch belongs to; with a delay each batch counts as one."""
        return number // self.round_size if self.is_synchronous else number


class BatchComputing:
    """The model and the data of one worker."""

    def __init__(self, config: TrainConfig, workload: Workload, objective: Objective, numbering: Numbering) -> None:
        self._config, self._workload, self._objective, self._numbering = config, workload, objective, numbering
        self._feed = Feed(workload.train_loader, config.seed)
        self._step: TrainStep | None = None

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters, by name."""
        return trained_parameters(self._workload.model)

    def prepare(self, take: Callable[[str, torch.Tensor], None]) -> dict[str, Any]:
        """Plan the step, whose gradients go to `take`; facts that all workers must share, and the peak."""
        model = self._workload.model
        model.train()
        batch = self._read(0)
        parameters = self.parameters()
        # What is on its way: all gradients, and the parameters that come back.
        moving_bytes = 2 * sum(parameter.nbytes for parameter in parameters.values())
        budget_bytes = None
        if self._config.budget is not None:
            budget_bytes = parse_budget(self._config.budget, model).num_bytes - moving_bytes
            if budget_bytes <= 0:
                raise CallError(
                    f"the budget of {self._config.budget} leaves nothing for a worker's step: gradients and parameters "
                    f"on their way take {moving_bytes:,} bytes"
                )
        self._step = train_step(
            model,
            batch.args,
            batch.kwargs,
            targets=batch.targets,
            loss=self._objective.training_loss,
            optimizer=SendGradients(parameters.items(), take),
            budget=budget_bytes,
            numerics=self._config.numerics,
            allow_other_bits=self._config.allow_other_bits,
        )
        tensors = {str(place): tensor for place, tensor in enumerate(batch.tensors())}
        return {
            "peak_bytes": self._step.peak_bytes + moving_bytes,
            "shared": {"the data": self._workload.describe(), "the first batch": hash_tensors(tensors)},
        }

    def compute(self, number: int) -> tuple[float, int]:
        """Run the step on a batch; its loss, and its examples."""
        assert self._step is not None
        batch = self._read(number)
        size = self._numbering.round_size
        torch.manual_seed(shard_seed(self._config.seed, number // size, number % size))
        loss = self._step(*batch.call, **batch.kwargs)
        return float(loss) * self._objective.accumulate, batch.num_examples

    def buffers(self) -> dict[str, Any]:
        """The model's buffers, as arrays."""
        return {name: item.numpy().copy() for name, item in self._workload.model.named_buffers()}

    def _read(self, number: int) -> Batch:
        raw = next(self._feed.batches(*self._numbering.place(number)))
        return self._objective.read(raw)


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Those that require a gradient, by their first names."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def join_buffers(model: torch.nn.Module, found: list[dict[str, Any]]) -> None:
    """Give the model the mean of all workers' buffers: each has seen other batches. Of counts, the largest."""
    if not found:
        return
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            arrays = numpy.stack([item[name] for item in found])
            joined = arrays.mean(axis=0, dtype=numpy.float64) if buffer.is_floating_point() else arrays.max(axis=0)
            buffer.copy_(torch.from_numpy(numpy.asarray(joined)))
